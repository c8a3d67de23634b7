//! Translates the reasons of the API into Spanish. The API writes them in English, with a code and the facts behind
//! them.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    details::cause_text,
    markup::Markup,
    prose::prose,
    texts::{Language, Texts},
    viewer::Viewer,
};

/// Maximum number of jobs that a sentence lists.
const MAX_LISTED: usize = 10;

/// One reason why a job is in its state.
#[derive(Deserialize)]
pub struct Reason {
    code: String,
    message: String,
    #[serde(flatten)]
    facts: Map<String, Value>,
}

impl Reason {
    /// Returns the reason in the viewer's language, with links. A reason without a translation is marked as English.
    pub fn shown(&self, viewer: &Viewer) -> Markup {
        let (t, jobs) = (viewer.texts(), self.jobs());
        let translated = match (self.code.as_str(), t.language()) {
            ("cancelled", _) => self.cancelled(t),
            (_, Language::English) => None,
            (_, Language::Spanish) => self.in_spanish(t),
        };
        match translated {
            Some(text) => prose(viewer, &as_sentence(&text), &jobs),
            None => english(viewer, &as_sentence(&self.message), &jobs),
        }
    }

    /// Returns when and why the job was cancelled. The API's message names the state of another job as `FAILED`, this
    /// one in words.
    fn cancelled(&self, t: &Texts) -> Option<String> {
        let (at, cause) = (self.text("cancelledAt")?, self.text("cause"));
        let cause = cause.map(|cause| cause_text(t, cause).unwrap_or_else(|| cause.to_owned()));
        Some(match (t.language(), cause) {
            (Language::English, Some(cause)) => format!("it was cancelled at {at}: {cause}"),
            (Language::English, None) => format!("it was cancelled at {at}; no reason was given"),
            (Language::Spanish, Some(cause)) => format!("se canceló a las {at}: {cause}"),
            (Language::Spanish, None) => format!("se canceló a las {at}, sin indicar el motivo"),
        })
    }

    /// Returns the ids of the jobs that the reason is about.
    fn jobs(&self) -> Vec<String> {
        let id = |job: &Value| job.as_str().or(job["id"].as_str()).map(str::to_owned);
        self.facts.get("jobs").and_then(Value::as_array).into_iter().flatten().filter_map(id).collect()
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.facts.get(name)?.as_str()
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.facts.get(name)?.as_u64()
    }

    /// Returns the end of a sentence about an error, if there is one and the viewer may see it.
    fn error(&self) -> String {
        self.text("error").map(|error| format!(": {error}")).unwrap_or_default()
    }

    /// Returns the workers that the reason is about.
    fn workers(&self) -> Option<String> {
        let ids = self.facts.get("workers")?.as_array()?.iter().filter_map(Value::as_str);
        Some(ids.collect::<Vec<_>>().join(", "))
    }

    fn scope(&self) -> Option<String> {
        let name = self.text("name").unwrap_or_default();
        Some(match self.text("scope")? {
            "system" => "el sistema".to_owned(),
            "queue" => format!("la cola «{name}»"),
            "type" => format!("el tipo «{name}»"),
            "key" => format!("la clave «{name}»"),
            "machine" => format!("la máquina «{name}»"),
            _ => return None,
        })
    }

    /// Returns `None` if the code is not known or a fact is missing.
    fn in_spanish(&self, t: &Texts) -> Option<String> {
        let until = self.text("until");
        Some(match self.code.as_str() {
            "depends_on" => self.depends_on(t)?,
            "waits_until" => match self.number("attempt") {
                Some(attempt) => {
                    let when = until.map_or("pronto".to_owned(), |at| format!("a las {at}"));
                    let attempts = self.number("attempts")?;
                    format!(
                        "el intento {attempt} de {attempts} empieza {when}; el último intento falló{}",
                        self.error()
                    )
                }
                None => format!("está programado para {}", until?),
            },
            "due" => "ya es su hora y estará listo en la próxima ronda".to_owned(),
            "next" => {
                format!(
                    "nada lo impide: está listo desde {} y es el siguiente para un hueco libre",
                    self.text("since")?
                )
            }
            "queue_paused" => {
                let because = self.text("reason").map(|text| format!(": {text}")).unwrap_or_default();
                let (queue, by, since) = (self.text("queue")?, self.text("by")?, self.text("since")?);
                format!("la cola «{queue}» está en pausa desde {since}, por {by}{because}")
            }
            "redis_unavailable" => {
                let (address, error) = (self.text("address")?, self.text("error")?);
                format!(
                    "la cola en Redis, en {address}, no está disponible ({error}); mientras tanto no empieza ningún trabajo, salvo que queue.fallback sea true"
                )
            }
            "limit_reached" => self.limit_reached()?,
            "rate_reached" => {
                let next = self.text("nextAt")?;
                format!("{} ha agotado su ritmo; el próximo trabajo empieza a las {next}", self.scope()?)
            }
            "jobs_ahead" => self.jobs_ahead()?,
            "failed" => self.failed()?,
            "scheduled" | "assigned" | "running" => self.running()?,
            _ => return self.about_workers(),
        })
    }

    /// Returns the reasons that have to do with workers and servers.
    fn about_workers(&self) -> Option<String> {
        let until = self.text("until");
        Some(match self.code.as_str() {
            "no_worker" => {
                let (kind, queue) = (self.text("type")?, self.text("queue")?);
                format!("ningún worker puede ejecutar el tipo «{kind}» de la cola «{queue}»")
            }
            "breaker_open" => {
                let until = until.map(|at| format!(" hasta las {at}")).unwrap_or_default();
                let workers = self.workers()?;
                format!("el circuito del worker {workers} está abierto{until}: han fallado demasiadas entregas")
            }
            "worker_draining" => format!("el worker {} se está vaciando y no acepta más trabajos", self.workers()?),
            "worker_disconnected" => {
                format!("el worker {} está desconectado y puede volver a conectarse", self.workers()?)
            }
            "workers_busy" => match self.number("workers")? {
                1 => "el único worker que puede ejecutarlo está ocupado".to_owned(),
                count => format!("los {count} workers que pueden ejecutarlo están ocupados"),
            },
            "worker_lost" => {
                let (worker, at) = (self.text("workerId")?, self.text("recoveryAt")?);
                format!("el worker {worker} está desconectado; si no vuelve, sus trabajos se recuperan a las {at}")
            }
            "server_lost" => {
                let server = self.text("server").map_or("su servidor".to_owned(), |id| format!("el servidor {id}"));
                format!("{server} no da señales de vida; sus trabajos se recuperan a las {}", self.text("recoveryAt")?)
            }
            "cancel_requested" => {
                let (since, reason) = (self.text("since")?, self.text("reason")?);
                format!("se pidió detenerlo a las {since} ({reason}) y su worker todavía no lo ha detenido")
            }
            _ => return None,
        })
    }

    fn depends_on(&self, t: &Texts) -> Option<String> {
        let jobs = self.facts.get("jobs")?.as_array()?;
        let listed = jobs.iter().take(MAX_LISTED).map(|job| {
            let state =
                job["status"].as_str().map_or("eliminado".to_owned(), |state| t.job_state(state).to_lowercase());
            format!("{} ({state})", job["id"].as_str().unwrap_or_default())
        });
        let listed = listed.collect::<Vec<_>>().join(", ");
        let more = match jobs.len().saturating_sub(MAX_LISTED) {
            0 => String::new(),
            more => format!(" y {more} más"),
        };
        Some(match jobs.len() {
            1 => format!("depende de 1 trabajo que no se ha completado: {listed}"),
            count => format!("depende de {count} trabajos que no se han completado: {listed}{more}"),
        })
    }

    fn limit_reached(&self) -> Option<String> {
        let (limit, running, jobs) = (self.number("limit")?, self.number("inFlight")?, self.jobs());
        let more = if running > jobs.len() as u64 { ", …" } else { "" };
        let listed = jobs.join(", ");
        Some(format!("{} admite {limit} a la vez, y hay {running} en ejecución: {listed}{more}", self.scope()?))
    }

    fn jobs_ahead(&self) -> Option<String> {
        let ahead = match (self.number("jobs")?, self.facts.get("exact")?.as_bool()?) {
            (1, _) => "tiene 1 trabajo delante en su cola".to_owned(),
            (jobs, true) => format!("tiene {jobs} trabajos delante en su cola"),
            (jobs, false) => format!("tiene {jobs} trabajos o más delante en su cola"),
        };
        let rate = self.facts.get("perMinute").and_then(Value::as_f64);
        Some(match (rate, self.text("estimatedStartAt")) {
            (Some(rate), Some(at)) => {
                format!("{ahead}; a {rate:.0} por minuto, como en el último minuto, empezará hacia las {at}")
            }
            (Some(_), None) => {
                format!("{ahead}; en el último minuto no se ha ejecutado ninguno, así que no hay estimación")
            }
            (None, _) => ahead,
        })
    }

    fn failed(&self) -> Option<String> {
        let reason = self.text("errorReason")?;
        let (attempt, attempts) = (self.number("attempt")?, self.number("attempts")?);
        let ending = match reason {
            "timeout" => "agotó su tiempo",
            "orphaned" => "se perdió con su worker",
            _ => "falló",
        };
        let why = match reason {
            "expired" => "ningún worker lo empezó antes de que caducara".to_owned(),
            "no_handler" => "ningún worker podía ejecutarlo".to_owned(),
            _ if attempts == 1 => format!("su único intento {ending}"),
            _ if attempt >= attempts => format!("el último de {attempts} intentos {ending}"),
            _ => format!("el intento {attempt} de {attempts} {ending} y no se repite"),
        };
        Some(format!("{why}{}", self.error()))
    }

    fn running(&self) -> Option<String> {
        let what = match self.code.as_str() {
            "scheduled" => "se está arrancando un proceso para él",
            "assigned" => "está asignado y no ha empezado",
            _ => "está en ejecución",
        };
        let worker = self.text("workerId").map(|id| format!(" (worker {id})")).unwrap_or_default();
        let progress =
            self.facts.get("progress").and_then(progress).map(|text| format!(", {text}")).unwrap_or_default();
        let (since, deadline) = (self.text("since")?, self.text("deadline")?);
        Some(format!("{what}{worker} desde {since}{progress}; su tiempo se agota a las {deadline}"))
    }
}

/// Returns a sentence with a capital letter at its start.
pub fn as_sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

fn progress(progress: &Value) -> Option<String> {
    let mut parts = Vec::new();
    parts.extend(progress["percentage"].as_f64().map(|percentage| format!("{percentage:.0} %")));
    if let (Some(done), Some(total)) = (progress["completedSteps"].as_u64(), progress["totalSteps"].as_u64()) {
        parts.push(format!("paso {done} de {total}"));
    }
    let texts = ["phase", "currentStep", "message"].into_iter().filter_map(|name| progress[name].as_str());
    parts.extend(texts.map(str::to_owned));
    // A worker that names only steps sends the same phase.
    parts.dedup();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Returns a sentence of the API that has no translation, marked as English on a Spanish page.
pub fn english(viewer: &Viewer, text: &str, jobs: &[String]) -> Markup {
    let sentence = prose(viewer, text, jobs);
    match viewer.texts().language() {
        Language::English => sentence,
        Language::Spanish => Markup::of(&English { sentence }),
    }
}

#[derive(askama::Template)]
#[template(ext = "html", source = r#"<span lang="en">{{ sentence }}</span>"#)]
struct English {
    sentence: Markup,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn in_spanish(reason: Value) -> Option<String> {
        let reason: Reason = serde_json::from_value(reason).expect("a reason");
        reason.in_spanish(Language::Spanish.texts())
    }

    #[test]
    fn a_reason_is_written_from_its_facts() {
        let failed = json!({
            "code": "failed", "message": "m", "error": "card declined", "errorReason": "error", "attempt": 1, "attempts": 2,
        });
        assert_eq!(in_spanish(failed).as_deref(), Some("el intento 1 de 2 falló y no se repite: card declined"));
        let limited = json!({
            "code": "limit_reached", "message": "m", "scope": "type", "name": "video.render", "limit": 1, "inFlight": 1,
            "jobs": ["j1"],
        });
        let expected = "el tipo «video.render» admite 1 a la vez, y hay 1 en ejecución: j1";
        assert_eq!(in_spanish(limited).as_deref(), Some(expected));
        let parents = json!({"code": "depends_on", "message": "m", "jobs": [{"id": "j1", "status": "QUEUED"}]});
        let expected = "depende de 1 trabajo que no se ha completado: j1 (en cola)";
        assert_eq!(in_spanish(parents).as_deref(), Some(expected));
        let busy = json!({"code": "workers_busy", "message": "m", "workers": 3});
        assert_eq!(in_spanish(busy).as_deref(), Some("los 3 workers que pueden ejecutarlo están ocupados"));
        let ahead = json!({"code": "jobs_ahead", "message": "m", "jobs": 2, "exact": true});
        assert_eq!(in_spanish(ahead).as_deref(), Some("tiene 2 trabajos delante en su cola"));
    }

    #[test]
    fn a_cancelled_job_says_why_in_words() {
        let cancelled = |cause: Value| -> Reason {
            let reason = json!({"code": "cancelled", "message": "m", "cause": cause, "cancelledAt": "T"});
            serde_json::from_value(reason).expect("a reason")
        };
        let parent = cancelled(json!("it depends on job j1, which is FAILED"));
        let (english, spanish) = (Language::English.texts(), Language::Spanish.texts());
        let expected = "it was cancelled at T: it depends on job j1, which is failed";
        assert_eq!(parent.cancelled(english).as_deref(), Some(expected));
        let expected = "se canceló a las T: depende del trabajo j1, cuyo estado es: fallido";
        assert_eq!(parent.cancelled(spanish).as_deref(), Some(expected));
        let expected = "se canceló a las T, sin indicar el motivo";
        assert_eq!(cancelled(Value::Null).cancelled(spanish).as_deref(), Some(expected));
        assert_eq!([as_sentence("él"), as_sentence("")], ["Él", ""]);
    }

    #[test]
    fn a_reason_that_is_not_known_or_has_no_facts_is_not_translated() {
        assert_eq!(in_spanish(json!({"code": "new_code", "message": "m"})), None);
        assert_eq!(in_spanish(json!({"code": "limit_reached", "message": "m"})), None);
    }
}
