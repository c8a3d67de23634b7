//! The coding task once more, written by hand: a reference that the interpreter of `coding-task.yaml` must agree with.
//!
//! It knows states, rounds, early and late events, repeated deliveries and deadlines, and nothing of definitions. The tests of the
//! store include this file by its path.

use std::collections::BTreeMap;

use serde_json::{Value, json};

pub const PLANNING: &str = "PLANIFICANDO";
pub const DECIDING: &str = "ESPERANDO_APROBACION_PLAN";
pub const STARTING: &str = "EJECUTANDO_CODIGO.INICIANDO";
pub const CODING: &str = "EJECUTANDO_CODIGO.MONITOREANDO_EJECUCION";
pub const TESTING: &str = "PROBANDO_INTEGRACION";
pub const REVIEWING: &str = "ESPERANDO_FEEDBACK_INTERNO";
pub const DONE: &str = "COMPLETADA";
pub const WRONG: &str = "FALLIDA_LOGICA";
pub const BROKEN: &str = "FALLIDA_INFRAESTRUCTURA";
pub const CANCELLED: &str = "CANCELADA";

const HEARTBEAT: &str = "resultado.estado_actualizado";
const MINUTE_MS: i64 = 60_000;
const DAY_MS: i64 = 24 * 60 * MINUTE_MS;
/// How many events may wait.
const MAX_WAITING: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Applied,
    Deferred,
    Ignored,
    Rejected,
}

/// An event of a service or a person.
#[derive(Clone, Debug)]
pub struct Message {
    pub id: String,
    pub kind: String,
    pub plan: &'static str,
    pub passed: bool,
    pub log: &'static str,
    pub progress: usize,
}

impl Message {
    /// Returns a payload that fits every event.
    pub fn payload(&self) -> Value {
        json!({
            "prompt": "p", "repositorioOrigen": "r", "planId": self.plan, "plan": "x", "pullRequestUrl": "u",
            "exito": self.passed, "log": self.log, "sessionId": "s1", "promptCorreccion": "c", "estado": self.progress,
            "motivo": "m",
        })
    }
}

/// A coding task whose plan needs an approval. Times are milliseconds.
#[derive(Clone, Debug)]
pub struct Model {
    pub state: &'static str,
    pub corrections: u32,
    pub plans_again: u32,
    pub waiting: Vec<Message>,
    plan: &'static str,
    failure: Option<&'static str>,
    progress: Option<usize>,
    created_ms: i64,
    entered_ms: i64,
    seen_ms: i64,
    progress_ms: i64,
    answers: BTreeMap<String, Answer>,
}

impl Model {
    pub fn new(now_ms: i64) -> Model {
        Model {
            state: PLANNING,
            corrections: 0,
            plans_again: 0,
            waiting: Vec::new(),
            plan: "",
            failure: None,
            progress: None,
            created_ms: now_ms,
            entered_ms: now_ms,
            seen_ms: now_ms,
            progress_ms: now_ms,
            answers: BTreeMap::new(),
        }
    }

    pub fn has_ended(&self) -> bool {
        [DONE, WRONG, BROKEN, CANCELLED].contains(&self.state)
    }

    /// Receives an event. An event that was answered before changes nothing. A rejected event may arrive again, and so
    /// may a heartbeat that changed nothing.
    pub fn receive(&mut self, message: &Message, now_ms: i64) -> Answer {
        if let Some(answer) = self.answers.get(&message.id) {
            return *answer;
        }
        let before = self.state;
        let answer = self.react(message, now_ms);
        let is_recorded = message.kind != HEARTBEAT || answer != Answer::Applied || self.state != before;
        if answer != Answer::Rejected && is_recorded {
            self.answers.insert(message.id.clone(), answer);
        }
        answer
    }

    fn react(&mut self, message: &Message, now_ms: i64) -> Answer {
        if self.has_ended() {
            return Answer::Ignored;
        }
        let before = self.clone();
        self.seen_ms = self.seen_ms.max(now_ms);
        let is_heartbeat = message.kind == HEARTBEAT;
        if is_heartbeat && self.progress != Some(message.progress) {
            self.progress = Some(message.progress);
            self.progress_ms = self.progress_ms.max(now_ms);
        }
        if self.handle(message, now_ms) {
            self.offer_waiting(now_ms);
            return Answer::Applied;
        }
        let answer = if is_heartbeat { Answer::Applied } else { self.unexpected(message) };
        match answer {
            Answer::Rejected => *self = before,
            Answer::Deferred => self.waiting.push(message.clone()),
            _ => {}
        }
        answer
    }

    /// Returns what happens to an event that the state does not handle.
    fn unexpected(&self, message: &Message) -> Answer {
        let is_result_of_past_phase = matches!(
            (self.state, message.kind.as_str()),
            (REVIEWING, _)
                | (DECIDING | STARTING | CODING | TESTING, "resultado.plan_generado")
                | (STARTING | CODING, "resultado.integracion_finalizada")
                | (TESTING, "resultado.pr_generada")
        );
        match message.kind.as_str() {
            _ if is_result_of_past_phase => Answer::Ignored,
            "tarea.crear" | "resultado.error" => Answer::Ignored,
            kind if kind.starts_with("tarea.") => Answer::Rejected,
            _ if self.waiting.len() >= MAX_WAITING => Answer::Rejected,
            _ => Answer::Deferred,
        }
    }

    /// Moves the task if the state handles the event.
    fn handle(&mut self, message: &Message, now_ms: i64) -> bool {
        match (self.state, message.kind.as_str()) {
            (PLANNING, "resultado.plan_generado") => {
                self.plan = message.plan;
                self.enter(DECIDING, now_ms);
            }
            (DECIDING, "tarea.aprobar_plan") if message.plan == self.plan => self.enter(STARTING, now_ms),
            (STARTING, HEARTBEAT) => {
                // Both states are inside the same outer state, whose deadlines continue.
                self.state = CODING;
                self.progress_ms = self.progress_ms.max(now_ms);
            }
            (STARTING | CODING, "resultado.pr_generada") => self.enter(TESTING, now_ms),
            (TESTING, "resultado.integracion_finalizada") => self.judge(message, now_ms),
            (PLANNING | STARTING | CODING | TESTING, "resultado.error") => self.enter(BROKEN, now_ms),
            _ => return false,
        }
        true
    }

    fn judge(&mut self, message: &Message, now_ms: i64) {
        if message.passed {
            self.enter(DONE, now_ms);
        } else if self.failure == Some(message.log) || self.corrections == 3 {
            self.enter(WRONG, now_ms);
        } else {
            self.corrections += 1;
            self.failure = Some(message.log);
            self.enter(REVIEWING, now_ms);
        }
    }

    fn enter(&mut self, state: &'static str, now_ms: i64) {
        self.state = state;
        self.entered_ms = now_ms;
        self.seen_ms = self.seen_ms.max(now_ms);
        self.progress_ms = self.progress_ms.max(now_ms);
        if self.has_ended() {
            self.waiting.clear();
        }
    }

    /// Applies what waits, the oldest first, until the state handles none of it. A waiting event never decides.
    fn offer_waiting(&mut self, now_ms: i64) {
        let mut position = 0;
        while position < self.waiting.len() {
            let message = self.waiting[position].clone();
            let mut next = self.clone();
            next.waiting.remove(position);
            if self.state != DECIDING && next.handle(&message, now_ms) {
                *self = next;
                position = 0;
            } else {
                position += 1;
            }
        }
    }

    /// Applies the decision of a person about the plan.
    pub fn decide(&mut self, approve: bool, now_ms: i64) -> Answer {
        if self.state != DECIDING {
            return Answer::Rejected;
        }
        if approve {
            self.enter(STARTING, now_ms);
        } else if self.plans_again == 2 {
            self.enter(WRONG, now_ms);
        } else {
            self.plans_again += 1;
            self.enter(PLANNING, now_ms);
        }
        self.offer_waiting(now_ms);
        Answer::Applied
    }

    /// Applies the end of the job of the language model, whether it has answered or not.
    pub fn review(&mut self, now_ms: i64) {
        if self.state == REVIEWING {
            self.enter(STARTING, now_ms);
            self.offer_waiting(now_ms);
        }
    }

    pub fn cancel(&mut self, now_ms: i64) -> Answer {
        if self.has_ended() {
            return Answer::Rejected;
        }
        self.enter(CANCELLED, now_ms);
        Answer::Applied
    }

    /// Ends the task if a limit has passed.
    pub fn apply_deadlines(&mut self, now_ms: i64) {
        if self.has_ended() {
            return;
        }
        let silent_ms = self.seen_ms.max(self.entered_ms);
        let idle_ms = self.progress_ms.max(self.entered_ms);
        let limits: &[i64] = match self.state {
            PLANNING => &[silent_ms + 5 * MINUTE_MS, self.entered_ms + 60 * MINUTE_MS],
            STARTING | CODING => {
                &[silent_ms + 5 * MINUTE_MS, idle_ms + 45 * MINUTE_MS, self.entered_ms + 360 * MINUTE_MS]
            }
            TESTING => &[silent_ms + 5 * MINUTE_MS, self.entered_ms + 120 * MINUTE_MS],
            REVIEWING => &[self.entered_ms + 30 * MINUTE_MS],
            _ => &[],
        };
        let lifetime_ms = self.created_ms + 30 * DAY_MS;
        let expiry_ms = self.entered_ms + 7 * DAY_MS;
        if self.state == DECIDING && expiry_ms <= now_ms && expiry_ms <= lifetime_ms {
            self.enter(CANCELLED, now_ms);
        } else if lifetime_ms <= now_ms || limits.iter().any(|limit| *limit <= now_ms) {
            self.enter(BROKEN, now_ms);
        }
    }
}
