//! `faena top`: a live view of queues, workers and jobs.
//!
//! The lists are read again every second, and the job that is open is followed through its own stream. The stream of all events
//! is not used: while a client reads it, the server stores every event of every job.
//!
//! The screen is restored however the command ends: by a key, a signal, an error or a panic.

mod app;
mod data;
mod details;
mod keys;
mod screen;
mod view;

use std::{
    io::{IsTerminal, stdin, stdout},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

use crate::{Api, CommandError, Connection, output::print};
use app::App;
use data::{Message, Scope, Snapshot};
use keys::Reaction;
use screen::Screen;

#[derive(Args)]
pub struct Arguments {
    /// Seconds between refreshes, 1 to 3600
    #[arg(long, default_value_t = 1, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    interval: u64,
    #[command(flatten)]
    connection: Connection,
}

pub const HELP: &str = "Keys: arrows move, Tab changes the list, Enter opens, Esc goes back, p pauses a queue or drains a worker, \
                        c cancels a job, r retries a job, f lists dead letters, ? shows all keys, q quits.\n\n\
                        With --json, prints the same data once and exits.\n\nExample:\n  faena top --interval 5";

/// Number of messages that may wait until the screen is drawn.
const MAX_MESSAGES: usize = 64;

pub async fn run(arguments: Arguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    if api.json {
        print(&data::read_json(&api).await?);
        return Ok(ExitCode::SUCCESS);
    }
    if !stdin().is_terminal() || !stdout().is_terminal() {
        let message = "\"faena top\" needs a terminal; use \"faena top --json\" for a single snapshot of the same data";
        return Err(CommandError::Usage(message.into()));
    }
    // The first snapshot is read before the screen changes, so that an unreachable server is reported as by other
    // commands.
    let first = Snapshot::read(&api, &Scope::Running).await?;
    let refresh = Duration::from_secs(arguments.interval);
    show(Arc::new(api), first, refresh)
        .await
        .map_err(|error| CommandError::Other(format!("cannot use the terminal: {error}")))
}

async fn show(api: Arc<Api>, first: Snapshot, refresh: Duration) -> std::io::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (messages, mut incoming) = mpsc::channel(MAX_MESSAGES);
    let (scope, scope_changes) = watch::channel(Scope::Running);
    let mut app = App::new(first, api.url());
    let mut screen = Screen::open()?;
    let mut keys = read_keys();
    let mut poller = tokio::spawn(data::poll(api.clone(), scope_changes, refresh, messages.clone()));
    let mut follower: Option<Follower> = None;
    // Redraws the screen, because the ages on it grow even if nothing arrives.
    let mut clock = interval(Duration::from_secs(1));
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        screen.draw(|frame| view::draw(frame, &mut app))?;
        let event = tokio::select! {
            _ = terminate.recv() => return Ok(ExitCode::from(143)),
            _ = hangup.recv() => return Ok(ExitCode::from(129)),
            _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
            event = keys.recv() => Some(event.ok_or_else(|| std::io::Error::other("cannot read keys"))?),
            Some(message) = incoming.recv() => { app.apply(message); None }
            _ = clock.tick() => None,
            // The poller ends only if it panics, and the panic has already restored the screen.
            _ = &mut poller => return Err(std::io::Error::other("the reader stopped")),
        };
        while let Ok(message) = incoming.try_recv() {
            app.apply(message);
        }
        let reaction = match event {
            Some(Event::Key(key)) if key.kind != KeyEventKind::Release => keys::press(&mut app, key),
            _ => Reaction::None,
        };
        match reaction {
            Reaction::None => {}
            Reaction::Quit => return Ok(ExitCode::SUCCESS),
            Reaction::Show(wanted) => {
                scope.send_replace(wanted);
            }
            Reaction::Open(id) => follower = Some(Follower::start(&api, id, &messages)),
            Reaction::Close => follower = None,
            Reaction::Act(action) => {
                let (api, messages, scope) = (api.clone(), messages.clone(), scope.clone());
                tokio::spawn(async move {
                    let _ = messages.send(Message::Acted(action.run(&api).await)).await;
                    // Wakes the poller, so that the change is seen now.
                    scope.send_modify(|_| {});
                });
            }
        }
        // The job's stream must be open exactly while its page is.
        debug_assert_eq!(follower.is_some(), app.details.is_some());
    }
}

/// Follows one job until it is dropped.
struct Follower(JoinHandle<()>);

impl Follower {
    fn start(api: &Arc<Api>, id: String, messages: &mpsc::Sender<Message>) -> Follower {
        Follower(tokio::spawn(data::follow(api.clone(), id, messages.clone())))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Reads keys on a thread of its own, which ends with the process: a read of a terminal cannot be cancelled.
fn read_keys() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(MAX_MESSAGES);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}
