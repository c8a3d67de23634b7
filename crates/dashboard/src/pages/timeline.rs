//! Draws the runs of a job on one time axis: waiting light, running solid, a mark where a run failed, now as a dotted line.

use askama::Template;
use faena_domain::Timestamp;

use crate::{format::Formats, markup::Markup};

/// Maximum number of runs to draw. If there are more, the newest are drawn.
const MAX_RUNS: usize = 12;
/// Narrowest bar, in percent.
const MIN_WIDTH: f64 = 0.3;

/// One run of a job. A run that has not started waits.
pub struct Run {
    pub label: String,
    /// Says more on hover.
    pub title: String,
    pub ready_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub end: End,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    None,
    Completed,
    Failed,
    Cancelled,
    /// The worker released the job. The run does not count as an attempt.
    Released,
}

struct Bar {
    label: String,
    title: String,
    rects: Vec<Rect>,
    /// How the run ended, and where.
    mark: Option<(&'static str, f64)>,
}

/// A part of a bar, in percent of the axis.
struct Rect {
    class: &'static str,
    x: f64,
    width: f64,
}

/// Position of the current time in percent, and the alignment of its label.
struct Now {
    x: f64,
    anchor: &'static str,
}

#[derive(Template)]
#[template(path = "timeline.html")]
struct Timeline<'a> {
    bars: Vec<Bar>,
    now: Option<Now>,
    now_label: &'a str,
    start: Markup,
    end: Markup,
    label: String,
    /// Says that earlier runs are left out.
    left_out: Option<String>,
}

/// Draws runs in their order. Positions are percentages, so that the drawing fills its width without stretching its text.
pub fn draw(runs: &[Run], formats: Formats, now_label: &str) -> Markup {
    let total = runs.len();
    let runs = &runs[total.saturating_sub(MAX_RUNS)..];
    let left_out =
        (total > MAX_RUNS).then(|| formats.language.texts().last_runs(runs.len(), &formats.count(total as u64)));
    let Some(from) = runs.iter().map(|run| run.ready_at).min() else { return Markup::default() };
    let is_open = runs.iter().any(|run| run.end == End::None);
    let last = runs.iter().filter_map(|run| run.ended_at).max().unwrap_or(from);
    let until = if is_open { last.max(formats.now) } else { last };
    let span = (until.ms_since(from).max(1)) as f64;
    let x = |at: Timestamp| (at.ms_since(from).max(0) as f64 / span * 1_000.0).round().min(1_000.0) / 10.0;
    let bar = |run: &Run| Bar {
        label: run.label.clone(),
        title: run.title.clone(),
        rects: rects(run, until, x),
        mark: mark(run, until, x),
    };
    Markup::of(&Timeline {
        bars: runs.iter().map(bar).collect(),
        // A line that moves all the time would make an unchanged page look changed.
        now: (is_open && !formats.is_live).then(|| {
            let x = x(formats.now);
            Now { x, anchor: if x > 90.0 { "end" } else { "middle" } }
        }),
        now_label,
        start: formats.clock(from),
        end: formats.clock(until),
        label: formats.duration(until.ms_since(from)),
        left_out,
    })
}

fn rects(run: &Run, until: Timestamp, x: impl Fn(Timestamp) -> f64) -> Vec<Rect> {
    let ended = run.ended_at.unwrap_or(until);
    let started = run.started_at.unwrap_or(ended);
    let rect = |class, from: f64, to: f64| Rect { class, x: from, width: (to - from).max(MIN_WIDTH) };
    let mut rects = vec![rect("wait", x(run.ready_at), x(started))];
    if run.started_at.is_some() {
        rects.push(rect("run", x(started), x(ended)));
    }
    rects
}

fn mark(run: &Run, until: Timestamp, x: impl Fn(Timestamp) -> f64) -> Option<(&'static str, f64)> {
    let class = match run.end {
        End::None => return None,
        End::Completed => "ok",
        End::Failed => "bad",
        End::Cancelled | End::Released => "off",
    };
    Some((class, x(run.ended_at.unwrap_or(until))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    fn run(ready: i64, started: Option<i64>, ended: Option<i64>, end: End) -> Run {
        let at = Timestamp::from_ms;
        Run {
            label: "<b>".into(),
            title: "Run 1".into(),
            ready_at: at(ready),
            started_at: started.map(at),
            ended_at: ended.map(at),
            end,
        }
    }

    #[test]
    fn a_failed_run_has_a_mark_and_an_open_one_reaches_now() {
        let formats = Formats { language: Language::English, now: Timestamp::from_ms(1_000), is_live: false };
        let svg = draw(&[run(0, Some(100), Some(500), End::Failed), run(600, None, None, End::None)], formats, "now");
        let svg = svg.to_string();
        assert!(svg.contains(r#"class="bad""#) && svg.contains("now") && svg.contains("&#60;b&#62;"), "{svg}");
        assert!(svg.contains(r#"x1="50%""#) && svg.contains(r#"x="60%""#) && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn a_drawing_of_too_many_runs_says_how_many_it_shows() {
        let runs: Vec<Run> = (0..40).map(|n| run(n, Some(n), Some(n + 1), End::Failed)).collect();
        let shown = |runs: &[Run], language| {
            draw(runs, Formats { language, now: Timestamp::from_ms(50), is_live: false }, "now").to_string()
        };
        assert!(shown(&runs, Language::English).contains("last 12 of 40 runs"));
        assert!(shown(&runs, Language::Spanish).contains("últimas 12 de 40 ejecuciones"));
        assert!(!shown(&runs[..12], Language::English).contains("last 12"));
    }

    #[test]
    fn no_runs_draw_nothing() {
        let formats = Formats { language: Language::English, now: Timestamp::from_ms(0), is_live: false };
        assert_eq!(draw(&[], formats, "now").to_string(), "");
    }
}
