//! The state of the screen: what was read, what is selected, what is open.

use std::{collections::VecDeque, time::Instant};

use faena::Job;
use faena_domain::WorkerView;
use faena_wire::QueueView;
use ratatui::widgets::TableState;

use super::{
    data::{Action, Message, Scope, Snapshot},
    details::Details,
};

/// Number of rates that the chart shows.
const RATES: usize = 240;

/// The list that the keys act on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pane {
    Queues,
    Workers,
    Jobs,
}

impl Pane {
    pub const ALL: [Pane; 3] = [Pane::Queues, Pane::Workers, Pane::Jobs];

    /// Returns the list that is `steps` after this one.
    pub fn after(self, steps: usize) -> Pane {
        Pane::ALL[(self as usize + steps) % Pane::ALL.len()]
    }
}

pub struct App {
    pub url: String,
    pub snapshot: Snapshot,
    pub read_at: Instant,
    /// Why the last refresh failed.
    pub outage: Option<String>,
    pub focus: Pane,
    pub scope: Scope,
    /// Position in each list.
    pub positions: [TableState; 3],
    /// Key of the selected row of each list, so that the selection follows it when rows move.
    selected: [Option<String>; 3],
    pub details: Option<Details>,
    /// Action that waits for its confirmation.
    pub question: Option<Action>,
    /// Result of the last action, and whether it failed.
    pub note: Option<(String, bool)>,
    pub is_help_open: bool,
    /// Runs that ended per minute, newest last.
    pub rates: VecDeque<u64>,
}

impl App {
    pub fn new(first: Snapshot, url: String) -> App {
        let mut app = App {
            url,
            snapshot: first,
            read_at: Instant::now(),
            outage: None,
            focus: Pane::Queues,
            scope: Scope::Running,
            positions: Default::default(),
            selected: Default::default(),
            details: None,
            question: None,
            note: None,
            is_help_open: false,
            rates: VecDeque::new(),
        };
        app.record_rate();
        app.follow_selections();
        app
    }

    pub fn apply(&mut self, message: Message) {
        match message {
            // The snapshot is of a list that is no longer shown.
            Message::Read(snapshot) if snapshot.scope != self.scope => {}
            Message::Read(snapshot) => {
                self.snapshot = *snapshot;
                self.read_at = Instant::now();
                self.outage = None;
                self.record_rate();
                self.follow_selections();
            }
            Message::Failed(reason) => self.outage = Some(reason),
            Message::Job(job) => {
                if let Some(details) = self.details.as_mut().filter(|details| details.id == job.id.to_string()) {
                    details.update(*job);
                }
            }
            Message::JobFailed { id, reason } => {
                if let Some(details) = self.details.as_mut().filter(|details| details.id == id) {
                    details.outage = Some(reason);
                }
            }
            Message::Acted(Ok(text)) => self.note = Some((text, false)),
            Message::Acted(Err(text)) => self.note = Some((text, true)),
        }
    }

    fn record_rate(&mut self) {
        self.rates.push_back(self.snapshot.finished_per_minute().unwrap_or(0.0).max(0.0) as u64);
        self.rates.drain(..self.rates.len().saturating_sub(RATES));
    }

    /// Shows another list of jobs. The rows of the old list disappear until the new ones arrive.
    pub fn show(&mut self, scope: Scope) {
        self.snapshot.jobs.jobs.clear();
        self.snapshot.jobs.total = 0;
        self.scope = scope;
        self.focus = Pane::Jobs;
        self.selected[Pane::Jobs as usize] = None;
        self.follow_selections();
    }

    pub fn workers(&self) -> &[WorkerView] {
        self.snapshot.workers.as_deref().unwrap_or_default()
    }

    pub fn selected_queue(&self) -> Option<&QueueView> {
        self.snapshot.queues.get(self.positions[Pane::Queues as usize].selected()?)
    }

    pub fn selected_worker(&self) -> Option<&WorkerView> {
        self.workers().get(self.positions[Pane::Workers as usize].selected()?)
    }

    /// Returns the job that keys act on: the open one, or the selected one.
    pub fn selected_job(&self) -> Option<&Job> {
        match &self.details {
            Some(details) => details.job.as_ref(),
            None => self.snapshot.jobs.jobs.get(self.positions[Pane::Jobs as usize].selected()?),
        }
    }

    fn row_keys(&self, pane: Pane) -> Vec<String> {
        match pane {
            Pane::Queues => self.snapshot.queues.iter().map(|queue| queue.name.clone()).collect(),
            Pane::Workers => self.workers().iter().map(|worker| worker.id.clone()).collect(),
            Pane::Jobs => self.snapshot.jobs.jobs.iter().map(|job| job.id.to_string()).collect(),
        }
    }

    /// Moves each selection to the row it was on. If that row no longer exists, the selection keeps its index in the list.
    fn follow_selections(&mut self) {
        for pane in Pane::ALL {
            let keys = self.row_keys(pane);
            let (selected, position) = (&mut self.selected[pane as usize], &mut self.positions[pane as usize]);
            let found = selected.as_ref().and_then(|key| keys.iter().position(|other| other == key));
            let row = found.or(position.selected()).unwrap_or(0).min(keys.len().saturating_sub(1));
            position.select((!keys.is_empty()).then_some(row));
            *selected = keys.into_iter().nth(row);
        }
    }

    /// Moves the selection of the focused list by `rows`.
    pub fn move_selection(&mut self, rows: isize) {
        let keys = self.row_keys(self.focus);
        let pane = self.focus as usize;
        let Some(last) = keys.len().checked_sub(1) else { return };
        let row = self.positions[pane].selected().unwrap_or(0).saturating_add_signed(rows).min(last);
        self.positions[pane].select(Some(row));
        self.selected[pane] = keys.into_iter().nth(row);
    }
}
