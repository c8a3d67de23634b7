//! Translates the details of logs and events into the viewer's language. The API stores them as English text.
//!
//! `faena_domain::LogDetails` reads what the server has written. Everything else comes from workers and callers, and is shown as it is.

use faena_domain::{
    AfterAttempt, DeliveryOutcome, LogDetails,
    schedule::{Misfire, ScheduleReason},
};

use crate::{
    format::Formats,
    markup::Markup,
    prose::prose,
    reasons::english,
    texts::{Language, Texts},
    viewer::Viewer,
};

/// Returns the details of an entry in the log of a job, with links.
pub fn log_details(viewer: &Viewer, event: &str, details: &str) -> Markup {
    match translated(viewer.texts(), viewer.formats(), event, details) {
        Some(text) => prose(viewer, &text, &[]),
        None if WRITTEN_BY_SERVER.contains(&event) => english(viewer, details, &[]),
        None => prose(viewer, details, &[]),
    }
}

/// Entries whose details only the server writes.
const WRITTEN_BY_SERVER: [&str; 11] = [
    "retry_success",
    "limited",
    "scheduled",
    "assigned",
    "retry_scheduled",
    "expired",
    "released",
    "recovered",
    "stale_report",
    "webhook_sent",
    "webhook_failed",
];

/// Returns why a job was cancelled, with links. A reason that a person gave is shown as it is.
pub fn cause(viewer: &Viewer, text: &str) -> Markup {
    let text = cause_text(viewer.texts(), text).unwrap_or_else(|| text.to_owned());
    prose(viewer, &text, &[])
}

/// Returns why a due time has created no job, or why a schedule has ended, with links.
pub fn schedule_reason(viewer: &Viewer, text: &str) -> Markup {
    let translated = match viewer.language() {
        Language::English => None,
        Language::Spanish => ScheduleReason::read(text).map(schedule_reason_in_spanish),
    };
    match translated {
        Some(text) => prose(viewer, &text, &[]),
        None => english(viewer, text, &[]),
    }
}

fn schedule_reason_in_spanish(reason: ScheduleReason) -> String {
    const NO_SERVER: &str = "no había ningún servidor en marcha a tiempo";
    match reason {
        ScheduleReason::Blackout { except } => format!("excluida por {except}"),
        ScheduleReason::Missed(Misfire::RunOnce) => {
            format!("{NO_SERVER}; solo se crea un trabajo, para la última hora prevista")
        }
        ScheduleReason::Missed(Misfire::Skip) => format!("{NO_SERVER}; las horas perdidas se omiten"),
        ScheduleReason::Missed(Misfire::CatchUp) => {
            format!("{NO_SERVER}; se perdieron más horas de las que se recuperan")
        }
        ScheduleReason::Unfinished { job } => format!("el trabajo {job} de una hora anterior no ha terminado"),
        ScheduleReason::Waiting { job } => format!("el trabajo {job} ya está esperando"),
        ScheduleReason::Replaced { by } => format!("la sustituye el trabajo de {by}, cuya hora también ha llegado"),
        ScheduleReason::MaxRuns { max } => format!("se alcanzó el número máximo de ejecuciones: {max}"),
        ScheduleReason::NoneLeft => "no queda ninguna hora prevista".to_owned(),
    }
}

/// Returns, in the viewer's language, why a job was cancelled; `None` if the reason is shown as it is.
pub fn cause_text(t: &Texts, text: &str) -> Option<String> {
    let is_spanish = t.language() == Language::Spanish;
    match LogDetails::of_cause(text)? {
        LogDetails::ParentEnded { parent, state: Some(state) } => {
            let state = t.job_state(state.as_str()).to_lowercase();
            Some(match is_spanish {
                true => format!("depende del trabajo {parent}, cuyo estado es: {state}"),
                false => format!("it depends on job {parent}, which is {state}"),
            })
        }
        LogDetails::ParentEnded { parent, state: None } if is_spanish => {
            Some(format!("depende del trabajo {parent}, que se ha eliminado"))
        }
        LogDetails::CancelledByRequest if is_spanish => Some("cancelado a petición".to_owned()),
        _ => None,
    }
}

/// Translates details that the server wrote. Returns `None` if they are shown as they are.
fn translated(t: &Texts, formats: Formats, event: &str, details: &str) -> Option<String> {
    let details = match (LogDetails::of_log(event, details)?, t.language()) {
        (LogDetails::Took { ms }, Language::English) => return Some(format!("after {}", formats.duration(ms))),
        (LogDetails::ParentEnded { .. } | LogDetails::CancelledByRequest, _) => return cause_text(t, details),
        (_, Language::English) => return None,
        (details, Language::Spanish) => details,
    };
    match details {
        LogDetails::Took { ms } => Some(format!("en {}", formats.duration(ms))),
        LogDetails::Assigned { worker } => Some(format!("al worker {worker}")),
        LogDetails::Starting { worker } => Some(format!("se está arrancando el worker {worker}")),
        LogDetails::NextAttempt { attempt, attempts, at } => {
            Some(format!("intento {attempt} de {attempts} a las {at}"))
        }
        LogDetails::Retried { retries: 1 } => Some("completado tras 1 reintento".to_owned()),
        LogDetails::Retried { retries } => Some(format!("completado tras {retries} reintentos")),
        LogDetails::Limited { scope, running, max } => {
            Some(format!("{}: {running} de {max} en ejecución", scope_words(t, scope)))
        }
        LogDetails::LimitedByRate { scope, rate } => {
            Some(format!("{}: límite de inicios ({})", scope_words(t, scope), rate.replace(" starts per ", " cada ")))
        }
        LogDetails::Webhook { url, outcome, attempt, attempts, next } => {
            let count = format!("intento {attempt} de {attempts}");
            Some(match next {
                AfterAttempt::Delivered { took_ms } => format!("{url}: {outcome} en {took_ms} ms, {count}"),
                AfterAttempt::Again { at } => format!("{url}: {outcome}, {count}; se repite a las {at}"),
                AfterAttempt::Abandoned => format!("{url}: {outcome}, {count}; abandonado"),
            })
        }
        _ => None,
    }
}

/// Returns what a limit applies to, with the word for its kind in the viewer's language: `tipo video.render`.
fn scope_words(t: &Texts, scope: &str) -> String {
    match scope.split_once(' ') {
        Some((kind, name)) if t.word(kind) != kind => format!("{} {name}", t.word(kind)),
        _ => t.word(scope).to_owned(),
    }
}

/// Returns the details of an entry of a trace that is neither of a job nor an event, with links.
pub fn trace_details(viewer: &Viewer, kind: &str, details: &str) -> Markup {
    match traced(viewer.texts(), viewer.formats(), kind, details) {
        Some(text) => prose(viewer, &text, &[]),
        None if matches!(kind, "webhook" | "schedule") => english(viewer, details, &[]),
        None => prose(viewer, details, &[]),
    }
}

fn traced(t: &Texts, formats: Formats, kind: &str, details: &str) -> Option<String> {
    let is_spanish = t.language() == Language::Spanish;
    match kind {
        "task" => traced_task(t, details),
        "webhook" => match LogDetails::of_trace_webhook(details)? {
            LogDetails::Delivery { attempt, outcome, took_ms } => {
                let took = formats.duration(i64::try_from(took_ms).unwrap_or(i64::MAX));
                let outcome = match outcome {
                    DeliveryOutcome::Status(status) => format!("HTTP {status}"),
                    DeliveryOutcome::Error(error) => error.to_owned(),
                };
                let (word, after) = if is_spanish { (t.attempt_word, "en") } else { ("attempt", "after") };
                Some(format!("{word} {attempt}: {outcome} {after} {took}"))
            }
            LogDetails::Receiver { event, state, url } if is_spanish => {
                let event = event.map(|event| format!("{event}, ")).unwrap_or_default();
                Some(format!("{event}{}: {url}", t.word(&state.to_uppercase()).to_lowercase()))
            }
            _ => None,
        },
        _ => None,
    }
}

/// Translates the number of decisions: `approved: 1 of 2`.
pub fn decision_count(t: &Texts, text: &str) -> Option<String> {
    let LogDetails::Approvals { given, needed } = LogDetails::of_decision(text)? else { return None };
    Some(format!("{}: {given} {} {needed}", t.word("approved"), t.of))
}

/// Translates `CHECKING; job check`, `PAYING to PAID; job pay` or `approved: 1 of 1`.
fn traced_task(t: &Texts, details: &str) -> Option<String> {
    if let Some(text) = decision_count(t, details) {
        return Some(text);
    }
    let (states, rest) = details.split_once("; ").map_or((details, None), |(states, rest)| (states, Some(rest)));
    let states = match states.split_once(" to ") {
        Some((from, to)) if is_state(from) && is_state(to) => format!("{from} → {to}"),
        None if is_state(states) => states.to_owned(),
        _ => return None,
    };
    let rest = rest.map(|rest| match rest.strip_prefix("job ") {
        Some(job) => format!("; {} {job}", t.word("job")),
        None => format!("; {rest}"),
    });
    Some(format!("{states}{}", rest.unwrap_or_default()))
}

/// Returns whether a text is the name of a state and not a sentence.
fn is_state(text: &str) -> bool {
    !text.is_empty() && !text.contains(' ')
}

/// Returns the details of an event of a job: its state, or the one before and the new one.
pub fn event_details(t: &Texts, details: &str) -> String {
    match details.split_once(" to ") {
        Some((from, to)) if t.job_state(from) != from && t.job_state(to) != to => {
            format!("{} → {}", t.job_state(from), t.job_state(to))
        }
        _ => t.job_state(details).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::Timestamp;

    use super::*;

    fn translate(language: Language, event: &str, details: &str) -> Option<String> {
        let formats = Formats { language, now: Timestamp::from_ms(0), is_live: false };
        translated(language.texts(), formats, event, details)
    }

    #[test]
    fn what_the_server_logs_is_translated() {
        let spanish = |event, details| translate(Language::Spanish, event, details).expect("a translation");
        assert_eq!(spanish("assigned", "to worker w1"), "al worker w1");
        assert_eq!(spanish("completed", "after 12051 ms"), "en 12 s");
        assert_eq!(spanish("retry_success", "completed after 1 retry"), "completado tras 1 reintento");
        assert_eq!(
            spanish("retry_scheduled", "attempt 2 of 4 at 2026-01-02T03:04:05Z"),
            "intento 2 de 4 a las 2026-01-02T03:04:05.000Z"
        );
        assert_eq!(
            spanish("limited", "the whole system: rate of 10 starts per 1 s"),
            "todo el sistema: límite de inicios (10 cada 1 s)"
        );
        assert_eq!(spanish("limited", "type video.render: 1 of 1 running"), "tipo video.render: 1 de 1 en ejecución");
        assert_eq!(
            spanish("webhook_sent", "http://h/a: HTTP 204 in 3 ms, attempt 1 of 4"),
            "http://h/a: HTTP 204 en 3 ms, intento 1 de 4"
        );
        assert_eq!(
            spanish("cancelled", "it depends on job j1, which is FAILED"),
            "depende del trabajo j1, cuyo estado es: fallido"
        );
        assert_eq!(translate(Language::English, "completed", "after 207 ms").as_deref(), Some("after 207 ms"));
    }

    #[test]
    fn what_workers_and_callers_write_is_not_translated() {
        for language in [Language::English, Language::Spanish] {
            assert_eq!(translate(language, "message", "to worker w1"), None);
            assert_eq!(translate(language, "completed", "after all"), None);
            assert_eq!(translate(language, "cancelled", "wrong customer"), None);
        }
    }

    #[test]
    fn the_details_of_a_trace_are_translated() {
        let shown = |language: Language, kind, details| {
            let formats = Formats { language, now: Timestamp::from_ms(0), is_live: false };
            traced(language.texts(), formats, kind, details)
        };
        let spanish = |kind, details| shown(Language::Spanish, kind, details).expect("a translation");
        assert_eq!(spanish("task", "PAYING to PAID; job pay"), "PAYING → PAID; trabajo pay");
        assert_eq!(spanish("webhook", "attempt 1: answered 204 after 3 ms"), "intento 1: HTTP 204 en 3 ms");
        assert_eq!(spanish("webhook", "task.ended, delivered to http://h/a"), "task.ended, entregado: http://h/a");
        assert_eq!(shown(Language::English, "webhook", "delivered to http://h/a"), None);
        assert_eq!(spanish("task", "CHECKING; job check"), "CHECKING; trabajo check");
        assert_eq!(spanish("task", "approved: 1 of 1"), "aprobado: 1 de 1");
        assert_eq!(shown(Language::Spanish, "task", "no answer to this"), None);
    }

    #[test]
    fn the_states_of_an_event_are_words() {
        let details = |language: Language, details| event_details(language.texts(), details);
        assert_eq!(details(Language::English, "PENDING to QUEUED"), "Pending → Queued");
        assert_eq!(details(Language::Spanish, "FAILED"), "Fallido");
        assert_eq!(details(Language::Spanish, "from a to b"), "from a to b");
    }
}
