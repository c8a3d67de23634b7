//! Small pieces of HTML that many pages share.

use std::fmt;

use askama::Template;

use crate::texts::Texts;

/// HTML that templates include unescaped. It comes from templates, which escape values, or from drawings of this
/// program.
#[derive(Clone, Debug, Default)]
pub struct Markup(String);

impl Markup {
    pub fn of(template: &impl Template) -> Markup {
        // Rendering to a string cannot fail, because no filter in these templates can.
        Markup(template.render().unwrap_or_default())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Wraps SVG that this program drew.
    pub fn drawing(svg: String) -> Markup {
        Markup(svg)
    }
}

impl fmt::Display for Markup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl askama::filters::HtmlSafe for Markup {}

/// Visual style of a state: a colour and a shape, the same on every page. The first seven are the states of jobs;
/// tasks, steps and webhooks use them with the same meaning. Everything else uses the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StateStyle {
    Queued,
    Waiting,
    Running,
    Completed,
    Retrying,
    Failed,
    Cancelled,
    /// Works as it should: a schedule that is active, a worker that is ready.
    On,
    /// Is working right now: a worker that is busy.
    Busy,
    /// Is starting or stopping.
    Changing,
    Paused,
    /// Is disabled or has ended.
    Off,
    /// A person may want to know.
    Warning,
    /// A person must act.
    Problem,
}

impl StateStyle {
    /// Returns the style of a state of a job, a worker, a task, a webhook or a check.
    pub fn of(state: &str) -> StateStyle {
        match state {
            "QUEUED" | "queued" => StateStyle::Queued,
            "PENDING" | "WAITING" => StateStyle::Waiting,
            "SCHEDULED" | "ASSIGNED" | "PROCESSING" | "running" | "SENDING" => StateStyle::Running,
            "COMPLETED" | "completed" | "DELIVERED" => StateStyle::Completed,
            "RETRYING" => StateStyle::Retrying,
            "FAILED" | "failed" => StateStyle::Failed,
            "CANCELLED" | "cancelled" => StateStyle::Cancelled,
            "Ready" | "healthy" | "fired" | "triggered" => StateStyle::On,
            "Busy" => StateStyle::Busy,
            "Creating" | "Connecting" | "Draining" | "Terminating" => StateStyle::Changing,
            "paused" => StateStyle::Paused,
            "degraded" | "missed" => StateStyle::Warning,
            "unhealthy" => StateStyle::Problem,
            _ => StateStyle::Off,
        }
    }

    pub fn class(self) -> &'static str {
        match self {
            StateStyle::Queued => "queued",
            StateStyle::Waiting => "waiting",
            StateStyle::Running => "running",
            StateStyle::Completed => "done",
            StateStyle::Retrying => "retry",
            StateStyle::Failed => "failed",
            StateStyle::Cancelled => "cancelled",
            StateStyle::On | StateStyle::Busy => "active",
            StateStyle::Changing | StateStyle::Paused | StateStyle::Off => "neutral",
            StateStyle::Warning => "warning",
            StateStyle::Problem => "problem",
        }
    }

    /// Returns the shape, drawn in a square of 10.
    fn shape(self) -> &'static str {
        match self {
            StateStyle::Queued => r#"<circle cx="5" cy="5" r="3.6" fill="none" stroke-width="1.7"/>"#,
            StateStyle::Waiting => {
                r#"<circle cx="5" cy="5" r="3.6" fill="none" stroke-width="1.7" stroke-dasharray="2 1.8"/>"#
            }
            StateStyle::Running => r#"<path d="M2.5 1.5 8.5 5 2.5 8.5z" stroke="none"/>"#,
            StateStyle::Completed => r#"<path d="M1.5 5.2 4 7.7 8.6 2.6" fill="none" stroke-width="1.8"/>"#,
            StateStyle::Retrying => {
                r#"<path d="M8.3 5A3.4 3.4 0 1 1 7 2.3M7.2.4V2.8H4.9" fill="none" stroke-width="1.5"/>"#
            }
            StateStyle::Failed => r#"<path d="M2 2 8 8M8 2 2 8" fill="none" stroke-width="1.9"/>"#,
            StateStyle::Cancelled => r#"<path d="M1.8 5H8.2" fill="none" stroke-width="1.9"/>"#,
            StateStyle::On => r#"<circle cx="5" cy="5" r="3.4" stroke="none"/>"#,
            StateStyle::Busy => r#"<rect x="1.8" y="1.8" width="6.4" height="6.4" rx="1" stroke="none"/>"#,
            StateStyle::Changing => r#"<path d="M5 1 9 5 5 9 1 5z" stroke="none"/>"#,
            StateStyle::Paused => r#"<path d="M3.2 1.8V8.2M6.8 1.8V8.2" fill="none" stroke-width="1.9"/>"#,
            StateStyle::Off => {
                r#"<rect x="1.8" y="1.8" width="6.4" height="6.4" rx="1" fill="none" stroke-width="1.4"/>"#
            }
            StateStyle::Warning | StateStyle::Problem => {
                r#"<path d="M5 1V6M5 7.6V9.3" fill="none" stroke-width="1.9"/>"#
            }
        }
    }
}

#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<span class="st {{ style.class() }}"><svg viewBox="0 0 10 10" aria-hidden="true">{{ style.shape()|safe }}</svg>{{ word }}</span>"#
)]
struct Badge<'a> {
    style: StateStyle,
    word: &'a str,
}

/// Returns a state as a badge with the given word.
pub fn badge(style: StateStyle, word: &str) -> Markup {
    Markup::of(&Badge { style, word })
}

/// Returns the shape of a state, without a word.
pub fn icon(style: StateStyle) -> Markup {
    Markup(format!(
        r#"<svg class="icon {}" viewBox="0 0 10 10" aria-hidden="true">{}</svg>"#,
        style.class(),
        style.shape()
    ))
}

/// Returns the shape of a state at a position in a larger drawing.
pub fn icon_at(style: StateStyle, x: usize, y: usize) -> Markup {
    Markup(format!(
        r#"<svg class="icon {}" x="{x}" y="{y}" width="10" height="10" viewBox="0 0 10 10">{}</svg>"#,
        style.class(),
        style.shape()
    ))
}

/// Returns the state of a job as a badge, in the viewer's language.
pub fn job_state(t: &Texts, state: &str) -> Markup {
    badge(StateStyle::of(state), t.job_state(state))
}

#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{{ label }}">{% for part in parts %}<rect class="{{ part.class }}" x="{{ part.x }}" width="{{ part.width }}" height="6"/>{% endfor %}</svg>"#
)]
struct Bar<'a> {
    parts: Vec<BarPart>,
    label: &'a str,
}

struct BarPart {
    class: &'static str,
    x: f64,
    width: f64,
}

/// Returns a bar whose parts are shares of `whole`.
pub fn bar(parts: &[(&'static str, f64)], whole: f64, label: &str) -> Markup {
    let mut x = 0.0;
    let mut drawn = Vec::new();
    for &(class, value) in parts {
        let width = if whole > 0.0 { (value / whole * 100.0).clamp(0.0, 100.0 - x) } else { 0.0 };
        drawn.push(BarPart { class, x, width });
        x += width;
    }
    Markup::of(&Bar { parts: drawn, label })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_of_a_badge_is_escaped() {
        let html = badge(StateStyle::Failed, "<script>alert(1)</script>").to_string();
        assert!(html.contains("&#60;script&#62;") && !html.contains("<script>"), "{html}");
    }

    #[test]
    fn every_state_of_a_job_has_a_style_of_its_own() {
        let styles =
            ["PENDING", "QUEUED", "PROCESSING", "RETRYING", "COMPLETED", "FAILED", "CANCELLED"].map(StateStyle::of);
        for (index, style) in styles.iter().enumerate() {
            assert!(!styles[..index].contains(style), "{style:?} stands for two states");
        }
        let others = ["Ready", "Busy", "Draining", "Terminated", "fired", "missed", "skipped", "healthy", "unhealthy"];
        assert!(
            others.iter().all(|state| !styles.contains(&StateStyle::of(state))),
            "a style of jobs is used elsewhere"
        );
    }

    #[test]
    fn the_parts_of_a_bar_never_exceed_it() {
        let html = bar(&[("p1", 80.0), ("p2", 80.0)], 100.0, "x").to_string();
        assert!(html.contains(r#"x="80" width="20""#), "{html}");
        assert!(bar(&[("p1", 1.0)], 0.0, "x").to_string().contains(r#"width="0""#));
    }
}
