//! Words of the API that pages show: states, outcomes, entries of logs. A word that is not listed is shown unchanged.

use faena_domain::schedule::RunNote;

use crate::texts::{Language, Texts};

/// The word of the API, in English, in Spanish.
const WORDS: &[(&str, &str, &str)] = &[
    // States of workers and circuits
    ("Creating", "Creating", "Creándose"),
    ("Connecting", "Connecting", "Conectando"),
    ("Ready", "Ready", "Listo"),
    ("Busy", "Busy", "Ocupado"),
    ("Draining", "Draining", "Vaciándose"),
    ("Terminating", "Terminating", "Terminando"),
    ("Terminated", "Terminated", "Terminado"),
    ("closed", "closed", "cerrado"),
    ("open", "open", "abierto"),
    ("half_open", "half open", "semiabierto"),
    ("built_in", "built in", "integrado"),
    ("remote", "remote", "remoto"),
    ("pool", "pool", "pool"),
    // Webhooks, sources and inboxes
    ("WAITING", "Waiting", "En espera"),
    ("SENDING", "Sending", "Enviándose"),
    ("DELIVERED", "Delivered", "Entregado"),
    ("FAILED", "Failed", "Fallido"),
    ("up", "up", "activo"),
    ("down", "down", "caído"),
    // Schedules
    ("fired", "fired", "disparada"),
    ("missed", "missed", "perdida"),
    ("skipped", "skipped", "omitida"),
    ("triggered", "triggered", "manual"),
    ("run_once", "run once", "ejecutar una vez"),
    ("catch_up", "catch up", "recuperar todas"),
    ("skip", "skip", "omitir"),
    ("allow", "allow", "permitir"),
    ("queue_one", "queue one", "dejar una en cola"),
    ("cancel_previous", "cancel previous", "cancelar la anterior"),
    ("next", "right after", "justo después"),
    ("first", "the first time", "la primera vez"),
    ("both", "both times", "las dos veces"),
    // Timers of tasks
    ("silence", "Silence", "Silencio"),
    ("noProgress", "No progress", "Sin progreso"),
    ("total", "Time limit", "Tiempo máximo"),
    ("lifetime", "Lifetime ends", "Fin de vida"),
    ("poll", "Next poll", "Próxima consulta"),
    ("remind", "Reminder", "Recordatorio"),
    ("escalate", "Escalation", "Escalado"),
    ("expire", "Expires", "Caduca"),
    // What an event did to a task
    ("deferred", "deferred", "aplazado"),
    ("ignored", "ignored", "ignorado"),
    ("stale", "stale", "obsoleto"),
    ("approved", "approved", "aprobado"),
    ("rejected", "rejected", "rechazado"),
    ("forbidden", "forbidden", "no permitido"),
    ("invalid", "invalid", "no válido"),
    // Findings
    ("error", "Error", "Error"),
    ("warning", "Warning", "Aviso"),
    // Health
    ("healthy", "healthy", "correcto"),
    ("degraded", "degraded", "degradado"),
    ("unhealthy", "unhealthy", "con problemas"),
    // Where a setting, a limit or an entry of a trace comes from
    ("default", "default", "valor predeterminado"),
    ("config", "configuration", "configuración"),
    ("api", "API", "API"),
    ("the configuration", "the configuration", "la configuración"),
    ("machine", "machine", "máquina"),
    ("the machine", "the machine", "la máquina"),
    ("system", "system", "sistema"),
    ("queue", "queue", "cola"),
    ("type", "type", "tipo"),
    ("key", "key", "clave"),
    ("schedule", "schedule", "planificación"),
    ("task", "task", "tarea"),
    ("job", "job", "trabajo"),
    ("webhook", "webhook", "webhook"),
    ("event", "event", "evento"),
    ("audit", "audit", "auditoría"),
    // The log of a job
    ("created", "created", "creado"),
    ("queued", "queued", "en cola"),
    ("limited", "limited", "limitado"),
    ("scheduled", "scheduled", "reservado"),
    ("assigned", "assigned", "asignado"),
    ("started", "started", "iniciado"),
    ("step_completed", "step completed", "paso terminado"),
    ("progress", "progress", "progreso"),
    ("message", "message", "mensaje"),
    ("retry_scheduled", "retry scheduled", "reintento programado"),
    ("retry_success", "retry succeeded", "reintento con éxito"),
    ("completed", "completed", "completado"),
    ("failed", "failed", "fallido"),
    ("timeout", "timed out", "tiempo agotado"),
    ("orphaned", "worker lost", "worker perdido"),
    ("expired", "expired", "caducado"),
    ("cancel_requested", "cancel requested", "cancelación pedida"),
    ("cancelled", "cancelled", "cancelado"),
    ("released", "released", "devuelto"),
    ("recovered", "recovered", "recuperado"),
    ("stale_report", "stale report", "informe tardío"),
    ("retried", "retried", "reintentado"),
    ("patched", "changed", "modificado"),
    ("parents_done", "dependencies done", "dependencias listas"),
    ("webhook_sent", "webhook sent", "webhook enviado"),
    ("webhook_failed", "webhook failed", "webhook fallido"),
    // Webhooks in a trace
    ("delivered", "delivered", "entregado"),
    ("not delivered", "not delivered", "sin entregar"),
    ("dropped", "dropped", "descartado"),
    // What a limit applies to
    ("the whole system", "the whole system", "todo el sistema"),
];

impl Texts {
    /// Returns the word for a priority.
    pub fn priority_word<'a>(&self, priority: &'a str) -> &'a str {
        match (self.language(), priority) {
            (Language::English, "LOW") => "low",
            (Language::English, "NORMAL") => "normal",
            (Language::English, "HIGH") => "high",
            (Language::English, "CRITICAL") => "critical",
            (Language::Spanish, "LOW") => "baja",
            (Language::Spanish, "NORMAL") => "normal",
            (Language::Spanish, "HIGH") => "alta",
            (Language::Spanish, "CRITICAL") => "crítica",
            (_, other) => other,
        }
    }

    /// Returns the word for a filter of the list of jobs.
    pub fn filter_word<'a>(&self, name: &'a str) -> &'a str {
        match name {
            "status" => self.state,
            "priority" => self.priority_title,
            "type" => self.kind,
            "name" => self.name,
            "queue" => self.queue,
            "tag" => self.tag,
            "error" => self.error,
            "payload" => self.payload,
            "reason" => self.reason,
            "workerId" => self.worker,
            "scheduleId" => self.schedule,
            "correlationId" => self.correlation,
            "createdAfter" => self.created_after,
            "createdBefore" => self.created_before,
            "q" => self.text,
            other => other,
        }
    }

    /// Returns the word for a state of a job.
    pub fn job_state<'a>(&self, state: &'a str) -> &'a str {
        match (self.language(), state) {
            (Language::English, "PENDING") => "Pending",
            (Language::English, "QUEUED") => "Queued",
            (Language::English, "SCHEDULED") => "Starting",
            (Language::English, "ASSIGNED") => "Assigned",
            (Language::English, "PROCESSING") => "Running",
            (Language::English, "RETRYING") => "Retrying",
            (Language::English, "COMPLETED") => "Completed",
            (Language::English, "FAILED") => "Failed",
            (Language::English, "CANCELLED") => "Cancelled",
            (Language::Spanish, "PENDING") => "Pendiente",
            (Language::Spanish, "QUEUED") => "En cola",
            (Language::Spanish, "SCHEDULED") => "Arrancando",
            (Language::Spanish, "ASSIGNED") => "Asignado",
            (Language::Spanish, "PROCESSING") => "En ejecución",
            (Language::Spanish, "RETRYING") => "En reintento",
            (Language::Spanish, "COMPLETED") => "Completado",
            (Language::Spanish, "FAILED") => "Fallido",
            (Language::Spanish, "CANCELLED") => "Cancelado",
            (_, other) => other,
        }
    }

    /// Returns the word for a status of a task.
    pub fn task_status<'a>(&self, status: &'a str) -> &'a str {
        match (self.language(), status) {
            (Language::English, "queued") => "Queued",
            (Language::English, "running") => "Running",
            (Language::English, "paused") => "Paused",
            (Language::English, "completed") => "Completed",
            (Language::English, "failed") => "Failed",
            (Language::English, "cancelled") => "Cancelled",
            (Language::Spanish, "queued") => "En cola",
            (Language::Spanish, "running") => "En ejecución",
            (Language::Spanish, "paused") => "En pausa",
            (Language::Spanish, "completed") => "Completada",
            (Language::Spanish, "failed") => "Fallida",
            (Language::Spanish, "cancelled") => "Cancelada",
            (_, other) => other,
        }
    }

    /// Says what daylight saving does to a run of a schedule.
    pub fn run_note(&self, note: &RunNote) -> String {
        match (self.language(), note) {
            (Language::English, note) => note.to_string(),
            // A time with its day is longer than one without.
            (Language::Spanish, RunNote::Moved { from, to }) if from.len() > 8 => {
                format!("{from} no existe; se ejecuta a las {to}")
            }
            (Language::Spanish, RunNote::Moved { from, to }) => {
                format!("las {from} no existen ese día; se ejecuta a las {to}")
            }
            (Language::Spanish, RunNote::First) => "esa hora ocurre dos veces ese día; esta es la primera".to_owned(),
            (Language::Spanish, RunNote::Second) => "esa hora ocurre dos veces ese día; esta es la segunda".to_owned(),
            (Language::Spanish, RunNote::Skipped { from, day }) => {
                format!("se omite la ejecución anterior: las {from} no existen el {day}")
            }
        }
    }

    /// Returns a word of the API in the viewer's language.
    pub fn word<'a>(&self, word: &'a str) -> &'a str {
        match WORDS.iter().find(|(known, _, _)| *known == word) {
            Some((_, english, _)) if self.language() == Language::English => english,
            Some((_, _, spanish)) => spanish,
            None => word,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_translated_and_an_unknown_one_is_shown_as_it_is() {
        let (english, spanish) = (Language::English.texts(), Language::Spanish.texts());
        assert_eq!((english.word("half_open"), spanish.word("half_open")), ("half open", "semiabierto"));
        assert_eq!((english.word("MY_STATE"), spanish.word("MY_STATE")), ("MY_STATE", "MY_STATE"));
        for (index, (word, english, spanish)) in WORDS.iter().enumerate() {
            assert!(!english.is_empty() && !spanish.is_empty(), "{word}");
            assert!(WORDS[..index].iter().all(|(other, _, _)| other != word), "{word} has two meanings");
        }
    }
}
