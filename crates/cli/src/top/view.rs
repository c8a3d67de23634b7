//! Draws the screen. Control characters are removed from every text that comes from the server.

use faena::Job;
use faena_domain::{Timestamp, WorkerState, WorkerView};
use faena_wire::QueueView;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Sparkline, Table},
};

use super::{
    app::{App, Pane},
    data::Scope,
    keys::KEYS,
};
use crate::{
    output::{approximate_duration, one_line},
    state_marks::{Colour, is_colour_disabled, state_mark, word_colour},
    watch::percentage,
};

/// From this width on, queues and workers are side by side.
const WIDE: u16 = 140;
/// With fewer lines, only one list is shown.
const MIN_HEIGHT: u16 = 12;
/// Widest line of the help.
const HELP_WIDTH: u16 = 74;
const BAR: usize = 10;

pub fn draw(frame: &mut Frame, app: &mut App) {
    let [header, body, footer] =
        Layout::vertical([Constraint::Length(3), Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    draw_header(frame, app, header);
    if app.details.is_some() {
        draw_details(frame, app, body);
    } else {
        draw_lists(frame, app, body);
    }
    frame.render_widget(Paragraph::new(footer_line(app)), footer);
    if app.is_help_open {
        draw_help(frame, body);
    }
}

fn colour(colour: Colour) -> Style {
    if is_colour_disabled() {
        return Style::new();
    }
    Style::new().fg(match colour {
        Colour::Red => Color::Red,
        Colour::Green => Color::Green,
        Colour::Yellow => Color::Yellow,
        Colour::Blue => Color::Blue,
        Colour::Magenta => Color::Magenta,
        Colour::Cyan => Color::Cyan,
        Colour::Grey => Color::DarkGray,
    })
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn draw_header(frame: &mut Frame, app: &App, area: Rect) {
    let chart_width = if area.width >= WIDE { 60 } else { 0 };
    let [text, chart] = Layout::horizontal([Constraint::Min(0), Constraint::Length(chart_width)]).areas(area);
    let metrics = &app.snapshot.metrics;
    let mut first = vec![Span::styled("faena top", bold()), Span::raw(format!("  {}  ", one_line(&app.url)))];
    first.push(match &app.outage {
        None => Span::raw(format!("up {}", approximate_duration(metrics.uptime))),
        Some(reason) => {
            let since = approximate_duration(app.read_at.elapsed().as_secs());
            Span::styled(format!("no new data for {since}: {}", one_line(reason)), colour(Colour::Red).patch(bold()))
        }
    });
    let queues = metrics.queues;
    let second = [
        ("ready", queues.priority, Colour::Cyan),
        ("scheduled", queues.delayed, Colour::Magenta),
        ("running", queues.processing, Colour::Blue),
        ("dead letters", queues.dlq, Colour::Red),
    ];
    let mut second: Vec<Span> = second
        .into_iter()
        .flat_map(|(name, n, shade)| [Span::styled(n.to_string(), colour(shade).patch(bold())), label(name)])
        .collect();
    let rate = app.snapshot.finished_per_minute().map_or("?".to_owned(), |rate| format!("{rate:.0}"));
    second.extend([Span::styled(rate, bold()), label("finished/min")]);
    let recent = metrics.jobs.last24h;
    let mut third = vec![Span::raw(format!(
        "24 h: {} created, {} completed, {} failed",
        recent.created, recent.completed, recent.failed
    ))];
    if let Some(workers) = metrics.workers {
        third.push(Span::raw(format!("   workers: {} busy, {} idle", workers.active, workers.idle)));
    }
    frame.render_widget(Paragraph::new(vec![Line::from(first), Line::from(second), Line::from(third)]), text);
    let hidden = app.rates.len().saturating_sub(usize::from(chart.width));
    let rates: Vec<u64> = app.rates.iter().skip(hidden).copied().collect();
    frame.render_widget(Sparkline::default().data(rates).style(colour(Colour::Blue)), chart);
}

fn label(name: &'static str) -> Span<'static> {
    Span::raw(format!(" {name}   "))
}

fn draw_lists(frame: &mut Frame, app: &mut App, area: Rect) {
    let weight = |pane| if app.focus == pane { Constraint::Fill(3) } else { Constraint::Fill(2) };
    if area.height < MIN_HEIGHT {
        return match app.focus {
            Pane::Queues => draw_queues(frame, app, area),
            Pane::Workers => draw_workers(frame, app, area),
            Pane::Jobs => draw_jobs(frame, app, area),
        };
    }
    let [queues, workers, jobs] = if area.width >= WIDE {
        let [top, jobs] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(2)]).areas(area);
        let [queues, workers] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).spacing(2).areas(top);
        [queues, workers, jobs]
    } else {
        Layout::vertical(Pane::ALL.map(weight)).areas(area)
    };
    draw_queues(frame, app, queues);
    draw_workers(frame, app, workers);
    draw_jobs(frame, app, jobs);
}

/// One column of a list.
struct Column {
    title: &'static str,
    width: Constraint,
    /// The column is hidden in a list that is narrower than this.
    min_list_width: u16,
}

fn column(title: &'static str, width: Constraint, min_list_width: u16) -> Column {
    Column { title, width, min_list_width }
}

/// Draws a list with a title and a header.
fn draw_table(frame: &mut Frame, app: &mut App, pane: Pane, area: Rect, list: List) {
    let is_focused = app.focus == pane;
    let title = if is_focused { format!("▶ {}", list.title) } else { format!("  {}", list.title) };
    let style = if is_focused { bold() } else { Style::new() };
    let block = Block::new().borders(Borders::TOP).title(Span::styled(title, style));
    if list.rows.is_empty() {
        let text = Paragraph::new(list.empty).style(colour(Colour::Grey)).block(block);
        return frame.render_widget(text, area);
    }
    let is_shown: Vec<bool> = list.columns.iter().map(|column| area.width >= column.min_list_width).collect();
    let visible = |cells: Vec<Cell<'static>>| {
        Row::new(cells.into_iter().zip(&is_shown).filter(|(_, shown)| **shown).map(|(cell, _)| cell))
    };
    let header = visible(list.columns.iter().map(|column| Cell::from(column.title)).collect());
    let widths: Vec<Constraint> =
        list.columns.iter().zip(&is_shown).filter(|(_, shown)| **shown).map(|(column, _)| column.width).collect();
    let selected = if is_focused { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
    let table = Table::new(list.rows.into_iter().map(visible).collect::<Vec<_>>(), widths)
        .header(header.style(colour(Colour::Grey)))
        .column_spacing(1)
        .row_highlight_style(selected)
        .block(block);
    frame.render_stateful_widget(table, area, &mut app.positions[pane as usize]);
}

struct List {
    title: String,
    columns: Vec<Column>,
    rows: Vec<Vec<Cell<'static>>>,
    /// Shown instead of rows.
    empty: &'static str,
}

fn text(text: &str) -> Cell<'static> {
    Cell::from(one_line(text))
}

fn number(number: u64) -> Cell<'static> {
    Cell::from(Line::from(number.to_string()).right_aligned())
}

fn draw_queues(frame: &mut Frame, app: &mut App, area: Rect) {
    let columns = vec![
        column("queue", Constraint::Fill(1), 0),
        column("ready", Constraint::Length(8), 0),
        column("oldest", Constraint::Length(7), 0),
        column("running", Constraint::Length(7), 0),
        column("scheduled", Constraint::Length(9), 0),
        column("finished/min", Constraint::Length(12), 0),
        column("settings", Constraint::Fill(1), 60),
    ];
    let rows = app.snapshot.queues.iter().map(queue_row).collect();
    let title = format!("queues ({})", app.snapshot.queues.len());
    let empty = "no queues yet; submit a job with \"faena enqueue TYPE\"";
    draw_table(frame, app, Pane::Queues, area, List { title, columns, rows, empty });
}

fn queue_row(queue: &QueueView) -> Vec<Cell<'static>> {
    let rate = queue.rate_per_minute.map(|rate| format!("{rate:.0}")).unwrap_or_default();
    let settings = match &queue.paused {
        Some(pause) => {
            let reason = pause.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
            text(&format!("paused by {}{reason}", pause.by)).style(colour(Colour::Yellow))
        }
        None => text(&crate::queues::settings(queue).join(", ")),
    };
    vec![
        text(&queue.name),
        number(queue.depth.total),
        text(&queue.oldest.map(since).unwrap_or_default()),
        number(queue.running),
        number(queue.pending + queue.retrying),
        Cell::from(Line::from(rate).right_aligned()),
        settings,
    ]
}

fn draw_workers(frame: &mut Frame, app: &mut App, area: Rect) {
    let columns = vec![
        column("worker", Constraint::Fill(2), 0),
        column("state", Constraint::Length(11), 0),
        column("jobs", Constraint::Length(7), 0),
        column("completed", Constraint::Length(9), 0),
        column("failed", Constraint::Length(7), 0),
        column("seen", Constraint::Length(7), 0),
        column("types", Constraint::Fill(2), 60),
    ];
    let running = |worker: &WorkerView| {
        let is_its_job = |job: &&Job| job.worker_id.as_deref() == Some(worker.id.as_str()) && !job.status.is_final();
        app.snapshot.jobs.jobs.iter().filter(is_its_job).count()
    };
    // Only the list of running jobs has every job of a worker.
    let is_known = app.scope == Scope::Running && app.snapshot.jobs.total <= app.snapshot.jobs.jobs.len() as u64;
    let rows = app.workers().iter().map(|worker| worker_row(worker, is_known.then(|| running(worker)))).collect();
    let (title, empty) = match &app.snapshot.workers {
        Some(workers) => (format!("workers ({})", workers.len()), "no workers are connected"),
        None => ("workers".to_owned(), "this API key may not see workers"),
    };
    draw_table(frame, app, Pane::Workers, area, List { title, columns, rows, empty });
}

fn worker_row(worker: &WorkerView, running: Option<usize>) -> Vec<Cell<'static>> {
    let state = worker.state.to_string();
    let shade = word_colour(&state).filter(|_| worker.state != WorkerState::Ready).map(colour).unwrap_or_default();
    let running = running.map_or("?".to_owned(), |n| n.to_string());
    let types = match worker.breaker.as_str() {
        "closed" => text(&worker.capabilities.join(", ")),
        breaker => text(&format!("breaker {breaker}")).style(colour(Colour::Red)),
    };
    vec![
        text(&worker.id),
        text(&state).style(shade),
        Cell::from(Line::from(format!("{running}/{}", worker.concurrency)).right_aligned()),
        number(worker.completed),
        number(worker.failed),
        text(&since(worker.last_seen_at)),
        types,
    ]
}

fn draw_jobs(frame: &mut Frame, app: &mut App, area: Rect) {
    let columns = vec![
        column("id", Constraint::Length(36), 0),
        column("state", Constraint::Length(12), 0),
        column("age", Constraint::Length(7), 0),
        column("type", Constraint::Fill(2), 0),
        column("queue", Constraint::Fill(1), 110),
        column("worker", Constraint::Fill(1), 130),
        column("progress", Constraint::Length(BAR as u16 + 6), 76),
        column("message", Constraint::Fill(3), 130),
    ];
    let jobs = &app.snapshot.jobs;
    let more = if jobs.total > jobs.jobs.len() as u64 { format!(" of {}", jobs.total) } else { String::new() };
    let title = format!("{} ({}{more})", one_line(&app.scope.title()), jobs.jobs.len());
    let rows = jobs.jobs.iter().map(job_row).collect();
    let empty = match app.scope {
        Scope::Running => "no job is running",
        _ => "no jobs",
    };
    draw_table(frame, app, Pane::Jobs, area, List { title, columns, rows, empty });
}

fn job_row(job: &Job) -> Vec<Cell<'static>> {
    let (mark, shade) = state_mark(&job.status);
    let message = job.progress.as_ref().and_then(|progress| progress.message.clone());
    let message = job.error.clone().filter(|_| !job.status.is_final() || job.result.is_none()).or(message);
    vec![
        text(&job.id.to_string()),
        text(&format!("{mark} {}", job.status)).style(colour(shade)),
        text(&job_age(job)),
        text(&job.kind),
        text(&job.queue),
        text(job.worker_id.as_deref().unwrap_or_default()),
        text(&progress_bar(job)),
        text(message.as_deref().unwrap_or_default()),
    ]
}

/// Returns the time since a job was started, or since it was created if it has not started.
fn job_age(job: &Job) -> String {
    let since = job.started_at.unwrap_or(job.created_at);
    approximate_duration(faena::Timestamp::now().saturating_duration_since(since).as_secs())
}

/// Returns `====      40 %`, or an empty text for a job that reports no progress.
fn progress_bar(job: &Job) -> String {
    let Some(percentage) = job.progress.as_ref().and_then(percentage) else { return String::new() };
    let percentage = percentage.clamp(0.0, 100.0);
    let filled = (percentage / 100.0 * BAR as f64).round() as usize;
    format!("{:<BAR$} {percentage:>3.0} %", "=".repeat(filled))
}

/// Returns the time since `at`, by the clock of this machine.
fn since(at: Timestamp) -> String {
    approximate_duration(u64::try_from(Timestamp::now().ms_since(at) / 1_000).unwrap_or(0))
}

fn draw_details(frame: &mut Frame, app: &mut App, area: Rect) {
    let Some(details) = &mut app.details else { return };
    let height = usize::from(area.height.saturating_sub(1));
    let lines: Vec<Line> = details.visible(height).iter().map(|line| Line::from(line.clone())).collect();
    let (first, last, all) = details.position();
    let mut title = vec![Span::styled(format!("▶ job {}", details.id), bold())];
    if let Some(job) = &details.job {
        let (mark, shade) = state_mark(&job.status);
        title.push(Span::styled(format!("  {mark} {}  ", job.status), colour(shade).patch(bold())));
        title.push(Span::raw(progress_bar(job)));
    }
    let mut block = Block::new().borders(Borders::TOP).title(Line::from(title));
    if all > height {
        block = block.title(Line::from(format!(" lines {first} to {last} of {all} ")).right_aligned());
    }
    let lines = match &details.outage {
        Some(reason) => vec![Line::styled(one_line(reason), colour(Colour::Red))],
        None if all == 0 => vec![Line::from("reading the job…")],
        None => lines,
    };
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn footer_line(app: &App) -> Line<'static> {
    if let Some(question) = app.question.as_ref().and_then(|action| action.question()) {
        return Line::styled(format!("{} y: yes, any other key: no", one_line(&question)), bold());
    }
    if let Some((note, is_error)) = &app.note {
        return Line::styled(one_line(note), colour(if *is_error { Colour::Red } else { Colour::Green }));
    }
    let keys = match app.focus {
        _ if app.details.is_some() => "c cancel  r retry  ↑↓ scroll  Esc back  ? help  q quit",
        Pane::Queues => "Enter its jobs  p pause or resume  f dead letters  Tab next list  ? help  q quit",
        Pane::Workers => "Enter its jobs  p drain or resume  f dead letters  Tab next list  ? help  q quit",
        Pane::Jobs => "Enter open  c cancel  r retry  f dead letters  Esc running  Tab next  ? help  q quit",
    };
    Line::styled(keys, colour(Colour::Grey))
}

fn draw_help(frame: &mut Frame, area: Rect) {
    let height = (KEYS.len() as u16 + 2).min(area.height);
    let width = HELP_WIDTH.min(area.width);
    let popup = Rect::new(area.x + (area.width - width) / 2, area.y + (area.height - height) / 2, width, height);
    let lines = KEYS.map(|(key, what)| Line::from(vec![Span::styled(format!(" {key:<10}"), bold()), Span::raw(what)]));
    frame.render_widget(Clear, popup);
    let block = Block::bordered().title(" keys; press any key to close ");
    frame.render_widget(Paragraph::new(lines.to_vec()).block(block), popup);
}
