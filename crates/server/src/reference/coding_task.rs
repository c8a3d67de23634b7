//! `docs/reference/coding-task.md` and its Spanish translation: every state and event of the built-in coding task.
//!
//! The structure comes from the definition. The Spanish sentences and those about payload fields are in `words`, and a
//! test checks that none is missing.

mod words;

use std::fmt::Write as _;

use faena_machine::{Action, BUILT_IN, Definition, State, Transition, Unexpected};
use serde_json::Value;

pub use self::words::Language;
use self::words::{about, about_field};
use super::escape_cell;

pub fn render(language: Language) -> String {
    let definition = Definition::parse(BUILT_IN[0].1).expect("the built-in machine is valid");
    Page { definition: &definition, language, text: String::new() }.render()
}

struct Page<'a> {
    definition: &'a Definition,
    language: Language,
    text: String,
}

impl Page<'_> {
    /// Returns the text in the language of the page.
    fn say(&self, english: &'static str, spanish: &'static str) -> &'static str {
        match self.language {
            Language::English => english,
            Language::Spanish => spanish,
        }
    }

    fn line(&mut self, line: impl AsRef<str>) {
        self.text.push_str(line.as_ref());
        self.text.push('\n');
    }

    fn render(mut self) -> String {
        let (page, other) = (self.say("coding-task", "coding-task.es"), self.say("coding-task.es", "coding-task"));
        self.text = super::generated_notice(page);
        self.line(self.say("# The coding task", "# La tarea de programación"));
        self.line("");
        self.line(format!("[{}]({other}.md)", self.say("En español", "In English")));
        self.line("");
        self.line(self.say(
            "`coding-task` plans a change to a repository, waits for the approval of the plan, has the smith write the change \
             and the sandbox test it, and sends a failed test back to the smith as a correction.",
            "`coding-task` planifica un cambio en un repositorio, espera la aprobación del plan, deja que el herrero escriba el \
             cambio y que el entorno de pruebas lo compruebe, y devuelve los fallos como correcciones.",
        ));
        self.line(self.say(
            "[Orchestrate tasks](../guides/tasks.md) explains machines in general.",
            "[Orchestrate tasks](../guides/tasks.md) explica las máquinas en general (en inglés).",
        ));
        self.line("");
        self.line(self.say(
            "![The states of the coding task](../images/coding-task.svg)",
            "![Los estados de la tarea de programación](../images/coding-task.svg)",
        ));
        self.input();
        self.states();
        self.events();
        self.limits();
        self.mermaid();
        self.text
    }

    fn input(&mut self) {
        self.line("");
        self.line(self.say("## Data of a new task", "## Datos de una tarea nueva"));
        let schema = self.definition.input.as_ref().map(|schema| &schema.source);
        self.fields(schema.unwrap_or(&Value::Null));
    }

    /// Writes a table of the fields of a schema.
    fn fields(&mut self, schema: &Value) {
        let mut rows = Vec::new();
        collect_fields(schema, "", &mut rows);
        if rows.is_empty() {
            self.line(self.say("The payload is empty.", "No lleva datos."));
            return;
        }
        self.line(self.say("| field | type | required | meaning |", "| campo | tipo | obligatorio | significado |"));
        self.line("|---|---|---|---|");
        for Field { path, kind, is_required } in rows {
            let required = if is_required { self.say("yes", "sí") } else { self.say("no", "no") };
            let about = about_field(&path, self.language).unwrap_or_default();
            self.line(format!("| `{path}` | {} | {required} | {} |", self.kind(&kind), escape_cell(about)));
        }
    }

    fn kind(&self, kind: &str) -> &'static str {
        match kind {
            "string" => self.say("text", "texto"),
            "boolean" => self.say("true or false", "verdadero o falso"),
            "object" => self.say("object", "objeto"),
            _ => self.say("any", "cualquiera"),
        }
    }

    fn states(&mut self) {
        self.line("");
        self.line(self.say("## States", "## Estados"));
        let definition = self.definition;
        for (index, state) in definition.states.iter().enumerate() {
            self.line("");
            self.line(format!("### {}", state.name));
            let english = state.description.as_deref().unwrap_or_default();
            self.line(about(&state.name, english, self.language).unwrap_or_default());
            if index == definition.initial {
                self.line(self.say("A new task begins here.", "Aquí empieza una tarea nueva."));
            }
            if let Some(parent) = state.parent {
                let parent = &definition.states[parent].name;
                self.line(format!("{} `{parent}`.", self.say("It is inside", "Está dentro de")));
            }
            if let Some(initial) = state.initial {
                let initial = &definition.states[initial].name;
                self.line(format!(
                    "{} `{initial}`.",
                    self.say("Its first inner state is", "Su primer estado interno es")
                ));
            }
            if let Some(ending) = state.ends {
                let ending = format!("{ending:?}").to_lowercase();
                self.line(format!("{} `{ending}`.", self.say("The task ends here as", "Aquí termina la tarea como")));
            }
            self.entry(state);
            self.times(state);
            self.transitions(state);
            self.policies(state);
        }
    }

    fn entry(&mut self, state: &State) {
        let done: Vec<String> = state.entry.iter().map(|action| self.action(action)).collect();
        if !done.is_empty() {
            self.line(format!("\n{} {}.", self.say("On entry:", "Al entrar:"), done.join("; ")));
        }
    }

    fn action(&self, action: &Action) -> String {
        match action {
            Action::Set(values) => {
                let keys: Vec<String> = values.iter().map(|(key, _)| format!("`{key}`")).collect();
                format!("{} {}", self.say("stores", "guarda"), keys.join(", "))
            }
            Action::Emit { event, .. } => format!("{} `{event}`", self.say("publishes", "publica")),
            Action::Job(job) => {
                let submits = self.say("submits the job", "envía el trabajo");
                format!("{submits} `{}` (`{}`)", job.name, job.job_type)
            }
        }
    }

    fn times(&mut self, state: &State) {
        let mut rows = Vec::new();
        let to = |state: usize| format!("`{}`", self.definition.states[state].name);
        if let Some(deadline) = &state.deadline {
            let limits = [
                (deadline.silence_ms, self.say("without any message", "sin ningún mensaje")),
                (deadline.no_progress_ms, self.say("without progress", "sin progreso")),
                (deadline.total_ms, self.say("in this state", "en este estado")),
            ];
            let known = limits.into_iter().filter_map(|(ms, what)| Some((ms?, what)));
            rows.extend(known.map(|(ms, what)| format!("| {} {what} | {} |", duration(ms), to(deadline.to))));
        }
        if let Some(approval) = &state.approval {
            for ms in &approval.remind_ms {
                let reminder = self.say("a reminder is published", "se publica un recordatorio");
                rows.push(format!("| {} | {reminder} |", duration(*ms)));
            }
            if let Some(expiry) = &approval.expires {
                let without = self.say("without a decision", "sin decisión");
                rows.push(format!("| {} {without} | {} |", duration(expiry.after_ms), to(expiry.to)));
            }
        }
        if let Some(poll) = &state.poll {
            let (every, publishes) = (self.say("every", "cada"), self.say("publishes", "publica"));
            rows.push(format!("| {every} {} | {publishes} `{}` |", duration(poll.every_ms), poll.event));
        }
        if let Some(approval) = &state.approval {
            let creator = match approval.allow_creator {
                true => self.say("the creator may decide too", "quien creó la tarea también puede decidir"),
                false => self.say("the creator may not decide", "quien creó la tarea no puede decidir"),
            };
            let needed = self.say("Approvals needed", "Aprobaciones necesarias");
            self.line(format!("\n{needed}: {}; {creator}.", approval.quorum));
        }
        if !rows.is_empty() {
            self.line("");
            self.line(self.say("| after | leads to |", "| tras | lleva a |"));
            self.line("|---|---|");
            rows.iter().for_each(|row| self.line(row));
        }
    }

    fn transitions(&mut self, state: &State) {
        if state.on.is_empty() {
            return;
        }
        self.line("");
        self.line(self.say("| event | condition | effect |", "| evento | condición | efecto |"));
        self.line("|---|---|---|");
        for (event, transitions) in &state.on {
            for transition in transitions {
                let guard = transition.guard.as_ref().map(|guard| format!("`{}`", escape_cell(guard.source())));
                let effect = self.effect(transition);
                self.line(format!("| `{event}` | {} | {effect} |", guard.unwrap_or_default()));
            }
        }
    }

    fn effect(&self, transition: &Transition) -> String {
        let mut parts = Vec::new();
        parts.extend(transition.to.map(|to| format!("→ `{}`", self.definition.states[to].name)));
        if let Some(approve) = transition.decision {
            let yes = self.say("counts as an approval by its sender", "cuenta como aprobación de quien lo envía");
            let no = self.say("counts as a denial by its sender", "cuenta como rechazo de quien lo envía");
            parts.push(if approve { yes } else { no }.to_owned());
        }
        parts.extend(transition.counter.as_ref().map(|name| format!("{} `{name}`", self.say("counts", "incrementa"))));
        parts.extend(transition.actions.iter().map(|action| self.action(action)));
        parts.join("; ")
    }

    fn policies(&mut self, state: &State) {
        let mut rows: Vec<String> = state
            .unexpected_events
            .iter()
            .map(|(event, policy)| format!("`{event}`: {}", self.policy(*policy)))
            .collect();
        let others = self.say("all other events", "cualquier otro");
        rows.extend(state.unexpected.map(|policy| format!("{others}: {}", self.policy(policy))));
        if !rows.is_empty() {
            let title = self.say("Not handled here:", "Eventos que no se tratan aquí:");
            self.line(format!("\n{title} {}.", rows.join("; ")));
        }
    }

    fn policy(&self, policy: Unexpected) -> &'static str {
        match policy {
            Unexpected::Defer => self.say("kept for a later state", "se guarda para un estado posterior"),
            Unexpected::Ignore => self.say("recorded, without effect", "se anota, sin efecto"),
            Unexpected::Reject => self.say("rejected", "se rechaza"),
        }
    }

    fn events(&mut self) {
        self.line("");
        self.line(self.say("## Events", "## Eventos"));
        self.line(self.say(
            "Every event is sent as `{metadata: {taskId, traceId, timestamp, originator}, payload}`.",
            "Cada evento se envía como `{metadata: {taskId, traceId, timestamp, originator}, payload}`.",
        ));
        let definition = self.definition;
        for (name, event) in &definition.events {
            self.line("");
            self.line(format!("### {name}"));
            let english = event.description.as_deref().unwrap_or_default();
            self.line(about(name, english, self.language).unwrap_or_default());
            let published = definition.states.iter().any(|state| publishes(state, name));
            let received = definition.start.as_ref() == Some(name)
                || event.heartbeat
                || definition.states.iter().any(|state| !state.transitions(name).is_empty());
            let direction = match (received, published) {
                (true, true) => self.say("Received and published by the task.", "La tarea lo recibe y lo publica."),
                (false, true) => self.say("Published by the task.", "Lo publica la tarea."),
                _ => self.say("Received by the task.", "Lo recibe la tarea."),
            };
            self.line(direction);
            let policy = self.policy(event.unexpected.unwrap_or(definition.unexpected));
            self.line(format!("{} {policy}.", self.say("If no state handles it:", "Si ningún estado lo trata:")));
            if event.heartbeat {
                self.line(
                    self.say(
                        "It also shows that its sender is alive.",
                        "También muestra que quien lo envía sigue vivo.",
                    ),
                );
            }
            self.line("");
            let schema = event.schema.as_ref().map_or(Value::Null, |schema| schema.source.clone());
            self.fields(&schema);
        }
    }

    fn limits(&mut self) {
        let definition = self.definition;
        self.line("");
        self.line(self.say("## Counters and limits", "## Contadores y límites"));
        self.line(self.say("| counter or limit | maximum | leads to |", "| contador o límite | máximo | lleva a |"));
        self.line("|---|---|---|");
        let state = |to: Option<usize>| to.map(|to| format!("`{}`", definition.states[to].name)).unwrap_or_default();
        for (name, counter) in &definition.counters {
            self.line(format!("| `{name}` | {} | {} |", counter.max, state(counter.exceeded)));
        }
        let limits = &definition.limits;
        let to = state(limits.to);
        self.line(format!("| {} | {} | {to} |", self.say("transitions", "transiciones"), limits.transitions));
        self.line(format!(
            "| {} | {} | {to} |",
            self.say("lifetime", "vida de la tarea"),
            duration(limits.lifetime_ms)
        ));
        self.line(format!(
            "| {} | {} KiB | |",
            self.say("data of the task", "datos de la tarea"),
            limits.context >> 10
        ));
        let cancelled = self.say("a person cancels the task", "una persona cancela la tarea");
        self.line(format!("| {cancelled} | | {} |", state(definition.cancel)));
    }

    fn mermaid(&mut self) {
        self.line("");
        self.line(self.say("## As a Mermaid diagram", "## Como diagrama Mermaid"));
        let mermaid = self.definition.to_mermaid();
        self.line(format!("```mermaid\n{}\n```", mermaid.trim_end()));
    }
}

fn publishes(state: &State, event: &str) -> bool {
    let emits = |action: &Action| matches!(action, Action::Emit { event: name, .. } if name == event);
    state.poll.as_ref().is_some_and(|poll| poll.event == event) || state.actions().any(emits)
}

struct Field {
    path: String,
    kind: String,
    is_required: bool,
}

fn collect_fields(schema: &Value, prefix: &str, fields: &mut Vec<Field>) {
    let required = |name: &str| schema["required"].as_array().is_some_and(|names| names.iter().any(|one| one == name));
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{prefix}{name}");
        let kind = property["type"].as_str().unwrap_or_default().to_owned();
        fields.push(Field { path: path.clone(), kind, is_required: required(name) });
        collect_fields(property, &format!("{path}."), fields);
    }
}

/// Writes a duration in its largest whole unit.
fn duration(ms: i64) -> String {
    let units = [("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)];
    let fitting = units.into_iter().find(|(_, unit)| ms % unit == 0);
    let (name, unit) = fitting.unwrap_or(("ms", 1));
    let mut text = String::new();
    let _ = write!(text, "{} {name}", ms / unit);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_event_and_field_is_described_in_both_languages() {
        let definition = Definition::parse(BUILT_IN[0].1).expect("the built-in machine is valid");
        for language in [Language::English, Language::Spanish] {
            let page = render(language);
            let is_on_page = |text: Option<&str>| text.is_some_and(|text| !text.is_empty() && page.contains(text));
            for state in &definition.states {
                assert!(page.contains(&format!("\n### {}\n", state.name)), "{}", state.name);
                let english = state.description.as_deref().unwrap_or_default();
                assert!(is_on_page(about(&state.name, english, language)), "{}", state.name);
                for (event, _) in &state.on {
                    assert!(page.contains(&format!("| `{event}` |")), "{event}");
                }
            }
            let mut fields = Vec::new();
            collect_fields(&definition.input.as_ref().expect("it has a schema").source, "", &mut fields);
            for (name, event) in &definition.events {
                assert!(page.contains(&format!("\n### {name}\n")), "{name}");
                let english = event.description.as_deref().unwrap_or_default();
                assert!(is_on_page(about(name, english, language)), "{name}");
                collect_fields(event.schema.as_ref().map_or(&Value::Null, |schema| &schema.source), "", &mut fields);
            }
            for Field { path, .. } in fields {
                assert!(page.contains(&format!("| `{path}` |")), "{path}");
                assert!(is_on_page(about_field(&path, language)), "{path} in {language:?}");
            }
            for (name, counter) in &definition.counters {
                assert!(page.contains(&format!("| `{name}` | {} |", counter.max)), "{name}");
            }
            for state in definition.states.iter().filter_map(|state| state.deadline.as_ref()) {
                for ms in [state.silence_ms, state.no_progress_ms, state.total_ms].into_iter().flatten() {
                    assert!(page.contains(&format!("| {} ", duration(ms))), "{ms}");
                }
            }
        }
    }

    #[test]
    fn durations_have_their_largest_whole_unit() {
        assert_eq!([300_000, 86_400_000, 5_400_000, 1_500].map(duration), ["5 min", "1 d", "90 min", "1500 ms"]);
    }
}
