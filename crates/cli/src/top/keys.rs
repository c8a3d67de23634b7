//! Maps the keys of `faena top` to actions.

use faena::JobState;
use faena_domain::WorkerState;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    app::{App, Pane},
    data::{Action, Scope},
    details::Details,
};

/// Rows that Page Up and Page Down move.
const PAGE: isize = 10;

/// What the loop has to do after a key press.
pub enum Reaction {
    None,
    Quit,
    /// Read these jobs.
    Show(Scope),
    /// Follow this job.
    Open(String),
    /// Stop following the job.
    Close,
    Act(Action),
}

/// All keys, for the help.
pub const KEYS: [(&str, &str); 11] = [
    ("↑ ↓ j k", "move; PgUp and PgDn by ten, Home and End to the ends"),
    ("Tab", "next list; Shift-Tab the previous one"),
    ("Enter", "queue or worker: list its jobs; job: open it"),
    ("Esc", "close the job, or list running jobs again"),
    ("p", "pause or resume the queue; drain or resume the worker"),
    ("c", "cancel the job"),
    ("r", "retry the job"),
    ("f", "list dead letters"),
    ("a", "list running jobs"),
    ("?", "this help"),
    ("q", "quit"),
];

pub fn press(app: &mut App, key: KeyEvent) -> Reaction {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Reaction::Quit,
            _ => Reaction::None,
        };
    }
    if let Some(action) = app.question.take() {
        return match key.code {
            KeyCode::Char('y' | 'Y') => Reaction::Act(action),
            _ => Reaction::None,
        };
    }
    if std::mem::take(&mut app.is_help_open) {
        return Reaction::None;
    }
    app.note = None;
    match key.code {
        KeyCode::Char('q') => Reaction::Quit,
        KeyCode::Char('?' | 'h') => {
            app.is_help_open = true;
            Reaction::None
        }
        KeyCode::Down | KeyCode::Char('j') => move_by(app, 1),
        KeyCode::Up | KeyCode::Char('k') => move_by(app, -1),
        KeyCode::PageDown | KeyCode::Char(' ') => move_by(app, PAGE),
        KeyCode::PageUp => move_by(app, -PAGE),
        KeyCode::Home => move_by(app, isize::MIN + 1),
        KeyCode::End => move_by(app, isize::MAX),
        KeyCode::Char('c') => ask(app, cancel),
        KeyCode::Char('r') => ask(app, retry),
        KeyCode::Esc | KeyCode::Backspace if app.details.take().is_some() => Reaction::Close,
        // The keys below act on lists.
        _ if app.details.is_some() => Reaction::None,
        KeyCode::Esc | KeyCode::Backspace | KeyCode::Char('a') => show(app, Scope::Running),
        KeyCode::Char('f') => show(app, Scope::Dead),
        KeyCode::Tab | KeyCode::Right => focus(app, 1),
        KeyCode::BackTab | KeyCode::Left => focus(app, Pane::ALL.len() - 1),
        KeyCode::Char('p') => ask(app, pause),
        KeyCode::Enter => open(app),
        _ => Reaction::None,
    }
}

fn move_by(app: &mut App, rows: isize) -> Reaction {
    match &mut app.details {
        Some(details) => details.scroll(rows),
        None => app.move_selection(rows),
    }
    Reaction::None
}

fn focus(app: &mut App, steps: usize) -> Reaction {
    app.focus = app.focus.after(steps);
    Reaction::None
}

fn show(app: &mut App, scope: Scope) -> Reaction {
    app.show(scope.clone());
    Reaction::Show(scope)
}

fn open(app: &mut App) -> Reaction {
    match app.focus {
        Pane::Queues => match app.selected_queue().map(|queue| queue.name.clone()) {
            Some(name) => show(app, Scope::Queue(name)),
            None => Reaction::None,
        },
        Pane::Workers => match app.selected_worker().map(|worker| worker.id.clone()) {
            Some(id) => show(app, Scope::Worker(id)),
            None => Reaction::None,
        },
        Pane::Jobs => match app.selected_job().map(|job| job.id.to_string()) {
            Some(id) => {
                app.details = Some(Details::new(id.clone()));
                Reaction::Open(id)
            }
            None => Reaction::None,
        },
    }
}

/// Runs the action of a key, after a question if the action has one. If it is not possible, shows what to do instead.
fn ask(app: &mut App, action: fn(&App) -> Result<Action, &'static str>) -> Reaction {
    match action(app) {
        Ok(action) if action.question().is_some() => {
            app.question = Some(action);
            Reaction::None
        }
        Ok(action) => Reaction::Act(action),
        Err(text) => {
            app.note = Some((text.to_owned(), true));
            Reaction::None
        }
    }
}

fn pause(app: &App) -> Result<Action, &'static str> {
    const NOTHING: &str = "nothing to pause; select a queue or a worker with Tab";
    match app.focus {
        Pane::Queues => {
            let queue = app.selected_queue().ok_or(NOTHING)?;
            let name = queue.name.clone();
            Ok(if queue.paused.is_some() { Action::Resume(name) } else { Action::Pause(name) })
        }
        Pane::Workers => {
            let worker = app.selected_worker().ok_or(NOTHING)?;
            let id = worker.id.clone();
            Ok(if worker.state == WorkerState::Draining { Action::CancelDrain(id) } else { Action::Drain(id) })
        }
        Pane::Jobs => Err(NOTHING),
    }
}

const NO_JOB: &str = "no job is selected; select one with Tab and the arrows";

fn cancel(app: &App) -> Result<Action, &'static str> {
    let job = job(app)?;
    if job.1.is_final() { Err("the job has finished; press r to retry it") } else { Ok(Action::Cancel(job.0)) }
}

fn retry(app: &App) -> Result<Action, &'static str> {
    let (id, state) = job(app)?;
    match state {
        JobState::Failed | JobState::Cancelled | JobState::Retrying => Ok(Action::Retry(id)),
        JobState::Completed => Err("the job has completed"),
        _ => Err("only a failed, cancelled or retrying job can be retried"),
    }
}

/// Returns the job that the key acts on.
fn job(app: &App) -> Result<(String, JobState), &'static str> {
    let acts_on_jobs = app.focus == Pane::Jobs || app.details.is_some();
    let job = app.selected_job().filter(|_| acts_on_jobs).ok_or(NO_JOB)?;
    Ok((job.id.to_string(), job.status.clone()))
}
