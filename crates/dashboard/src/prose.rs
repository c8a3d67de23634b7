//! Shows sentences of the API with times in the viewer's zone, and with links to jobs, tasks and workers.

use askama::Template;
use faena_domain::Timestamp;

use crate::{
    format::short_id,
    markup::Markup,
    table::{anchor, escaped},
    viewer::Viewer,
};

#[derive(Template)]
#[template(ext = "html", source = "{% for part in parts %}{{ part }}{% endfor %}")]
struct Sentence {
    parts: Vec<Markup>,
}

/// Length of a UUID, and of a time with milliseconds.
const ID_CHARS: usize = 36;
const TIME_CHARS: usize = 24;

/// Returns a sentence in which times are shown in the viewer's zone and ids are links. An id after "worker", "task" or
/// "job", in English or Spanish, links to that page, and any other id links to a job if `jobs` contains it.
pub fn prose(viewer: &Viewer, text: &str, jobs: &[String]) -> Markup {
    let mut parts = Vec::new();
    let (mut shown, mut at) = (0, 0);
    while at < text.len() {
        let Some(found) = mention(viewer, text, at, jobs) else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        let (mention, length) = found;
        parts.push(escaped(&text[shown..at]));
        parts.push(mention);
        at += length;
        shown = at;
    }
    parts.push(escaped(&text[shown..]));
    Markup::of(&Sentence { parts })
}

/// Returns what the text mentions at a position, and its length.
fn mention(viewer: &Viewer, text: &str, at: usize, jobs: &[String]) -> Option<(Markup, usize)> {
    // Times and ids begin with a hexadecimal digit that is not part of a longer word.
    let before = text[..at].chars().next_back();
    if !text.as_bytes()[at].is_ascii_hexdigit() || before.is_some_and(char::is_alphanumeric) {
        return None;
    }
    if let Some(time) = text.get(at..at + TIME_CHARS).filter(|time| time.ends_with('Z'))
        && let Ok(time) = time.parse::<jiff::Timestamp>()
    {
        return Some((viewer.formats().instant(Timestamp::from_ms(time.as_millisecond())), TIME_CHARS));
    }
    let id = text.get(at..at + ID_CHARS).filter(|id| is_id(id))?;
    let page = match text[..at].trim_end_matches(['"', ' ']).rsplit(' ').next() {
        Some("worker" | "Worker" | "(worker") => "workers",
        Some("task" | "Task" | "tarea") => "tasks",
        Some("job" | "Job" | "trabajo") => "jobs",
        _ if jobs.iter().any(|job| job == id) => "jobs",
        _ => return None,
    };
    Some((anchor(&format!("{}/{page}/{id}", viewer.base()), &short_id(id)), ID_CHARS))
}

fn is_id(text: &str) -> bool {
    text.bytes().enumerate().all(|(index, byte)| match index {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    })
}
