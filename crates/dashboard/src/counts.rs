//! Texts that contain a number and agree with it in both languages.

use crate::texts::{Language, Texts};

/// The words after the number 1 and after other numbers.
type Forms = [&'static str; 2];

impl Texts {
    fn counted(&self, count: &str, number: u64, english: Forms, spanish: Forms) -> String {
        let [one, several] = match self.language() {
            Language::English => english,
            Language::Spanish => spanish,
        };
        if number == 1 { format!("1 {one}") } else { format!("{count} {several}") }
    }

    /// Says that only the last runs are drawn.
    pub fn last_runs(&self, shown: usize, total: &str) -> String {
        match self.language() {
            Language::English => format!("last {shown} of {total} runs"),
            Language::Spanish => format!("últimas {shown} de {total} ejecuciones"),
        }
    }

    /// Says how many of the ready jobs are in paused queues.
    pub fn in_paused_queues(&self, count: &str) -> String {
        match self.language() {
            Language::English => format!("{count} of these in paused queues"),
            Language::Spanish => format!("{count} de ellos en colas en pausa"),
        }
    }

    pub fn jobs_count(&self, count: String, number: u64) -> String {
        self.counted(&count, number, ["job", "jobs"], ["trabajo", "trabajos"])
    }

    pub fn more_types_count(&self, count: String, number: u64) -> String {
        self.counted(&count, number, ["more type", "more types"], ["tipo más", "tipos más"])
    }

    /// Says how many jobs an action has changed.
    pub fn changed_jobs_count(&self, count: String, number: u64) -> String {
        let spanish = ["trabajo modificado", "trabajos modificados"];
        self.counted(&count, number, ["job changed", "jobs changed"], spanish)
    }

    pub fn scheduled_count(&self, count: String, number: u64) -> String {
        self.counted(&count, number, ["scheduled", "scheduled"], ["programado", "programados"])
    }

    pub fn slots_count(&self, count: String, number: u64) -> String {
        self.counted(&count, number, ["slot", "slots"], ["hueco", "huecos"])
    }

    pub fn failed_runs_count(&self, count: String, number: u64) -> String {
        let spanish = ["ejecución fallida", "ejecuciones fallidas"];
        self.counted(&count, number, ["failed run", "failed runs"], spanish)
    }

    pub fn waiting_events_count(&self, count: String, number: u64) -> String {
        let spanish = ["evento en espera", "eventos en espera"];
        self.counted(&count, number, ["event waiting", "events waiting"], spanish)
    }

    pub fn dead_letters_count(&self, count: String, number: u64) -> String {
        let spanish = ["trabajo fallido", "trabajos fallidos"];
        self.counted(&count, number, ["dead letter", "dead letters"], spanish)
    }

    pub fn approvals_count(&self, count: String, number: u64) -> String {
        let spanish = ["aprobación pendiente", "aprobaciones pendientes"];
        self.counted(&count, number, ["approval waiting", "approvals waiting"], spanish)
    }

    /// Says how many attempts a job may have, for a job that has had none.
    pub fn attempts_allowed(&self, number: u64) -> String {
        let spanish = ["intento como máximo", "intentos como máximo"];
        self.counted(&number.to_string(), number, ["attempt at most", "attempts at most"], spanish)
    }

    pub fn decisions_needed(&self, number: u64) -> String {
        match (self.language(), number) {
            (Language::English, 1) => "1 decision needed".to_owned(),
            (Language::English, _) => format!("{number} decisions needed"),
            (Language::Spanish, 1) => "falta 1 decisión".to_owned(),
            (Language::Spanish, _) => format!("faltan {number} decisiones"),
        }
    }

    /// Says how many tasks have a status: `3 running`.
    pub fn tasks_with_status(&self, count: u64, status: &str) -> String {
        let word = self.task_status(status).to_lowercase();
        // The other statuses have no plural.
        let has_plural = matches!(status, "completed" | "failed" | "cancelled");
        match self.language() {
            Language::Spanish if has_plural && count != 1 => format!("{count} {word}s"),
            _ => format!("{count} {word}"),
        }
    }

    /// Says how many dependencies a graph leaves out.
    pub fn hidden_dependencies(&self, count: &str, is_exact: bool) -> String {
        let count = match (self.language(), is_exact) {
            (_, true) => count.to_owned(),
            (Language::English, false) => format!("{count} or more"),
            (Language::Spanish, false) => format!("{count} o más"),
        };
        match self.language() {
            Language::English => format!("Dependencies not shown: {count}. Open a job to see those around it."),
            Language::Spanish => {
                format!("Dependencias que no se muestran: {count}. Abre un trabajo para ver las que lo rodean.")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_agree_with_their_number() {
        let (english, spanish) = (Language::English.texts(), Language::Spanish.texts());
        assert_eq!(english.changed_jobs_count("1".into(), 1), "1 job changed");
        assert_eq!(spanish.changed_jobs_count("1".into(), 1), "1 trabajo modificado");
        assert_eq!(spanish.changed_jobs_count("2".into(), 2), "2 trabajos modificados");
        assert_eq!(spanish.failed_runs_count("1".into(), 1), "1 ejecución fallida");
        let statuses = ["queued", "running", "paused", "completed", "failed", "cancelled"];
        for status in statuses {
            assert_eq!(english.tasks_with_status(2, status), format!("2 {status}"));
        }
        assert_eq!(
            [(1, "failed"), (2, "failed"), (2, "running")]
                .map(|(count, status)| spanish.tasks_with_status(count, status)),
            ["1 fallida", "2 fallidas", "2 en ejecución"]
        );
    }
}
