//! Draws the runs of a job on one time axis: waiting light, running solid, a mark where a run failed, now as a dotted line.

use askama::Template;
use faena_domain::Timestamp;

use crate::{format::Formats, markup::Markup};

/// Runs that are drawn; of more, the newest.
const MAX_RUNS: usize = 12;
const WIDTH: f64 = 720.0;
const LABELS: f64 = 96.0;
const ROW: f64 = 26.0;

/// One run of a job. A run that has not started waits.
pub struct Run {
    pub label: String,
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
}

struct Bar {
    label: String,
    y: f64,
    text_y: f64,
    rects: Vec<Rect>,
}

struct Rect {
    class: &'static str,
    x: f64,
    width: f64,
}

#[derive(Template)]
#[template(path = "timeline.html")]
struct Timeline<'a> {
    height: f64,
    axis_y: f64,
    bars: Vec<Bar>,
    now_x: Option<f64>,
    now_label: &'a str,
    start: String,
    label: String,
    first_x: f64,
}

/// Draws runs in their order.
pub fn draw(runs: &[Run], formats: Formats, now_label: &str) -> Markup {
    let runs = &runs[runs.len().saturating_sub(MAX_RUNS)..];
    let Some(from) = runs.iter().map(|run| run.ready_at).min() else { return Markup::default() };
    let is_open = runs.iter().any(|run| run.end == End::None);
    let last = runs.iter().filter_map(|run| run.ended_at).max().unwrap_or(from);
    let until = if is_open { last.max(formats.now) } else { last };
    let span = (until.ms_since(from).max(1)) as f64;
    let x = |at: Timestamp| LABELS + (at.ms_since(from).max(0) as f64 / span).min(1.0) * (WIDTH - LABELS);
    let bar = |(index, run): (usize, &Run)| {
        let y = index as f64 * ROW;
        Bar { label: run.label.clone(), y, text_y: y + 13.0, rects: rects(run, until, x) }
    };
    let bars: Vec<Bar> = runs.iter().enumerate().map(bar).collect();
    let axis_y = bars.len() as f64 * ROW + 12.0;
    Markup::of(&Timeline {
        height: axis_y + 6.0,
        axis_y,
        // A line that moves all the time would make an unchanged page look changed.
        now_x: (is_open && !formats.is_live).then(|| x(formats.now)),
        now_label,
        start: from.to_string().get(11..19).unwrap_or_default().to_owned(),
        label: format!("{} {}", runs.len(), formats.duration(until.ms_since(from))),
        bars,
        first_x: LABELS,
    })
}

fn rects(run: &Run, until: Timestamp, x: impl Fn(Timestamp) -> f64) -> Vec<Rect> {
    let ended = run.ended_at.unwrap_or(until);
    let started = run.started_at.unwrap_or(ended);
    let rect = |class, from: f64, to: f64| Rect { class, x: from, width: (to - from).max(1.0) };
    let mut rects = vec![rect("wait", x(run.ready_at), x(started))];
    if run.started_at.is_some() {
        rects.push(rect("run", x(started), x(ended)));
    }
    let mark = match run.end {
        End::None => return rects,
        End::Completed => "ok",
        End::Failed => "bad",
        End::Cancelled => "off",
    };
    rects.push(Rect { class: mark, x: x(ended) - 4.0, width: 4.0 });
    rects
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    fn run(ready: i64, started: Option<i64>, ended: Option<i64>, end: End) -> Run {
        let at = Timestamp::from_ms;
        Run { label: "<b>".into(), ready_at: at(ready), started_at: started.map(at), ended_at: ended.map(at), end }
    }

    #[test]
    fn a_failed_run_has_a_mark_and_an_open_one_reaches_now() {
        let formats = Formats { language: Language::English, now: Timestamp::from_ms(1_000), is_live: false };
        let svg = draw(&[run(0, Some(100), Some(500), End::Failed), run(600, None, None, End::None)], formats, "now");
        let svg = svg.to_string();
        assert!(svg.contains(r#"class="bad""#) && svg.contains("now") && svg.contains("&#60;b&#62;"), "{svg}");
        assert!(svg.contains(r#"x="96""#) && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn no_runs_draw_nothing() {
        let formats = Formats { language: Language::English, now: Timestamp::from_ms(0), is_live: false };
        assert_eq!(draw(&[], formats, "now").to_string(), "");
    }
}
