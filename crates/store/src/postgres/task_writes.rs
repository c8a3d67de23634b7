//! The rows that a batch of tasks writes: one statement per table, all sent without waiting for each other.

use deadpool_postgres::Object;
use faena_domain::Timestamp;
use futures_util::join;
use tokio_postgres::{Statement, types::ToSql};
use uuid::Uuid;

use super::{end::storable, machines::version_number};
use crate::{
    Result,
    tasks::{Batch, ChangedTask, Plan, TaskColumns, TaskEvent, TaskJob, tags_text, to_text},
};

/// Where the rows of a batch are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TransactionControl {
    /// In a transaction of their own, which has not begun.
    BeginAndCommit,
    /// In a transaction that has begun, and is committed with the rows.
    CommitOnly,
    /// In the caller's transaction, which the caller commits.
    ByCaller,
}

/// Begins a transaction whose statements keep their plans. PostgreSQL: planning a statement again for the arrays of
/// each small batch would cost more than running it. A plan that was made while the tables were empty must not scan
/// them when they have grown.
pub const BEGIN: &str =
    "BEGIN; SET LOCAL jit = off; SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off";

/// The rows of a batch, column by column.
pub struct TaskWrites {
    tasks: TaskRows,
    /// Columns that only new tasks write.
    new: Option<NewRows>,
    records: RecordRows,
    inbox: InboxRows,
    links: LinkRows,
    events: EventRows,
}

#[derive(Default)]
struct TaskRows {
    ids: Vec<Uuid>,
    statuses: Vec<&'static str>,
    states: Vec<String>,
    updated_at: Vec<i64>,
    ended_at: Vec<Option<i64>>,
    due_at: Vec<Option<i64>>,
    approvals: Vec<bool>,
    bodies: Vec<String>,
    versions: Vec<i32>,
    entered_at: Vec<i64>,
    events: Vec<i64>,
}

#[derive(Default)]
struct NewRows {
    machines: Vec<String>,
    titles: Vec<Option<String>>,
    correlations: Vec<String>,
    tags: Vec<Option<String>>,
    tag_names: Vec<String>,
    tag_tasks: Vec<Uuid>,
}

#[derive(Default)]
struct RecordRows {
    tasks: Vec<Uuid>,
    sequences: Vec<i64>,
    records: Vec<String>,
}

#[derive(Default)]
struct InboxRows {
    tasks: Vec<Uuid>,
    events: Vec<String>,
    answers: Vec<String>,
}

#[derive(Default)]
struct LinkRows {
    jobs: Vec<Uuid>,
    tasks: Vec<Uuid>,
    names: Vec<String>,
    states: Vec<String>,
    epochs: Vec<i64>,
}

#[derive(Default)]
struct EventRows {
    ids: Vec<Uuid>,
    kinds: Vec<String>,
    subjects: Vec<Uuid>,
    sequences: Vec<i64>,
    correlations: Vec<String>,
    actors: Vec<String>,
    data: Vec<String>,
    at: i64,
}

/// Converts a number for PostgreSQL, which has no unsigned types.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn stored(text: &str) -> String {
    storable(text).into_owned()
}

impl TaskRows {
    fn add(&mut self, id: Uuid, task: &ChangedTask) -> Result<()> {
        let columns = TaskColumns::of(&task.view);
        self.ids.push(id);
        self.statuses.push(columns.status);
        self.states.push(columns.state);
        self.updated_at.push(task.view.updated_at.as_ms());
        self.ended_at.push(columns.ended_at);
        self.due_at.push(columns.due_at);
        self.approvals.push(columns.is_approval);
        self.bodies.push(to_text(&task.view.task)?);
        self.versions.push(version_number(columns.version));
        self.entered_at.push(columns.entered_at);
        self.events.push(signed(task.view.events));
        Ok(())
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 11] {
        [
            &self.ids,
            &self.statuses,
            &self.states,
            &self.updated_at,
            &self.ended_at,
            &self.due_at,
            &self.approvals,
            &self.bodies,
            &self.versions,
            &self.entered_at,
            &self.events,
        ]
    }
}

impl NewRows {
    fn add(&mut self, id: Uuid, task: &ChangedTask) -> Result<()> {
        let view = &task.view;
        self.machines.push(view.machine.clone());
        self.titles.push(view.title.as_deref().map(stored));
        self.correlations.push(stored(&view.correlation));
        self.tags.push(tags_text(&view.tags)?.map(|tags| stored(&tags)));
        self.tag_names.extend(view.tags.iter().map(|tag| stored(tag)));
        self.tag_tasks.extend(view.tags.iter().map(|_| id));
        Ok(())
    }
}

impl RecordRows {
    fn of(plan: &Plan) -> Result<RecordRows> {
        let mut rows = RecordRows::default();
        for (task, record) in &plan.records {
            rows.tasks.push(task.0);
            rows.sequences.push(signed(record.sequence));
            rows.records.push(to_text(record)?);
        }
        Ok(rows)
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 3] {
        [&self.tasks, &self.sequences, &self.records]
    }
}

impl InboxRows {
    fn of(plan: &Plan) -> Result<InboxRows> {
        let mut rows = InboxRows::default();
        for (task, event, answer) in &plan.inbox {
            rows.tasks.push(task.0);
            rows.events.push(event.clone());
            rows.answers.push(to_text(answer)?);
        }
        Ok(rows)
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 3] {
        [&self.tasks, &self.events, &self.answers]
    }
}

impl LinkRows {
    fn of(links: &[TaskJob]) -> LinkRows {
        let mut rows = LinkRows::default();
        for link in links {
            rows.jobs.push(link.job.0);
            rows.tasks.push(link.task.0);
            rows.names.push(link.name.clone());
            rows.states.push(link.state.clone());
            rows.epochs.push(signed(link.epoch));
        }
        rows
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 5] {
        [&self.jobs, &self.tasks, &self.names, &self.states, &self.epochs]
    }
}

impl EventRows {
    fn of(events: &[TaskEvent], now: Timestamp) -> EventRows {
        let mut rows = EventRows { at: now.as_ms(), ..EventRows::default() };
        for event in events {
            rows.ids.push(event.id);
            rows.kinds.push(event.kind.clone());
            rows.subjects.push(event.task.0);
            rows.sequences.push(signed(event.sequence));
            rows.correlations.push(stored(&event.correlation));
            rows.actors.push(stored(&event.actor));
            rows.data.push(event.data.clone());
        }
        rows
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 8] {
        [
            &self.ids,
            &self.kinds,
            &self.subjects,
            &self.sequences,
            &self.correlations,
            &self.actors,
            &self.data,
            &self.at,
        ]
    }
}

impl TaskWrites {
    /// Returns the rows of tasks that exist.
    pub fn of_changed(batch: &mut Batch, plan: &Plan, now: Timestamp) -> Result<TaskWrites> {
        let mut tasks = TaskRows::default();
        for (id, task) in batch.changed() {
            tasks.add(id.0, task)?;
        }
        TaskWrites::of(tasks, None, plan, now)
    }

    /// Returns the rows of new tasks.
    pub fn of_new(batch: &mut Batch, plan: &Plan, now: Timestamp) -> Result<TaskWrites> {
        let (mut tasks, mut new) = (TaskRows::default(), NewRows::default());
        for (id, task) in batch.changed() {
            tasks.add(id.0, task)?;
            new.add(id.0, task)?;
        }
        TaskWrites::of(tasks, Some(new), plan, now)
    }

    fn of(tasks: TaskRows, new: Option<NewRows>, plan: &Plan, now: Timestamp) -> Result<TaskWrites> {
        Ok(TaskWrites {
            tasks,
            new,
            records: RecordRows::of(plan)?,
            inbox: InboxRows::of(plan)?,
            links: LinkRows::of(&plan.links),
            events: EventRows::of(&plan.events, now),
        })
    }

    /// Writes the rows in one round trip.
    ///
    /// If a statement fails, those after it fail too, and the COMMIT that was sent with them rolls back.
    pub async fn send(&self, client: &Object, control: TransactionControl) -> Result<()> {
        // Every statement is prepared before the first one is sent: COMMIT must not overtake one.
        let statements = self.prepare(client).await?;
        let mut tasks = self.tasks.parameters().to_vec();
        let mut tags: [&(dyn ToSql + Sync); 2] = [&self.tasks.ids, &self.tasks.ids];
        if let Some(new) = &self.new {
            tasks.extend([&new.machines as &(dyn ToSql + Sync), &new.titles, &new.correlations, &new.tags]);
            tags = [&new.tag_names, &new.tag_tasks];
        }
        let (records, inbox) = (self.records.parameters(), self.inbox.parameters());
        let (links, events) = (self.links.parameters(), self.events.parameters());
        let (begun, tasks, tags, records, inbox, links, announced, events, committed) = join!(
            command(client, if control == TransactionControl::BeginAndCommit { BEGIN } else { "" }),
            execute(client, &statements.tasks, &tasks),
            execute(client, &statements.tags, &tags),
            execute(client, &statements.records, &records),
            execute(client, &statements.inbox, &inbox),
            execute(client, &statements.links, &links),
            execute(client, &statements.announce, &[]),
            execute(client, &statements.events, &events),
            command(client, if control == TransactionControl::ByCaller { "" } else { "COMMIT" }),
        );
        for result in [begun, tasks, tags, records, inbox, links, announced, events, committed] {
            result?;
        }
        Ok(())
    }

    async fn prepare(&self, client: &Object) -> Result<Statements> {
        let is_new = self.new.is_some();
        let has_tags = self.new.as_ref().is_some_and(|new| !new.tag_names.is_empty());
        let has_events = !self.events.ids.is_empty();
        Ok(Statements {
            tasks: prepare(client, if is_new { INSERT_TASKS } else { UPDATE_TASKS }, !self.tasks.ids.is_empty())
                .await?,
            tags: prepare(client, INSERT_TAGS, has_tags).await?,
            records: prepare(client, INSERT_RECORDS, !self.records.tasks.is_empty()).await?,
            inbox: prepare(client, INSERT_INBOX, !self.inbox.tasks.is_empty()).await?,
            links: prepare(client, INSERT_LINKS, !self.links.jobs.is_empty()).await?,
            announce: prepare(client, "SELECT faena.announce_events()", has_events).await?,
            events: prepare(client, INSERT_EVENTS, has_events).await?,
        })
    }
}

/// Statements for the tables that a batch writes to.
struct Statements {
    tasks: Option<Statement>,
    tags: Option<Statement>,
    records: Option<Statement>,
    inbox: Option<Statement>,
    links: Option<Statement>,
    announce: Option<Statement>,
    events: Option<Statement>,
}

/// Prepares a statement if there are rows for it.
async fn prepare(client: &Object, sql: &str, has_rows: bool) -> Result<Option<Statement>> {
    Ok(if has_rows { Some(client.prepare_cached(sql).await?) } else { None })
}

async fn execute(
    client: &Object,
    statement: &Option<Statement>,
    parameters: &[&(dyn ToSql + Sync)],
) -> std::result::Result<(), tokio_postgres::Error> {
    match statement {
        Some(statement) => client.execute(statement, parameters).await.map(drop),
        None => Ok(()),
    }
}

async fn command(client: &Object, sql: &str) -> std::result::Result<(), tokio_postgres::Error> {
    if sql.is_empty() { Ok(()) } else { client.batch_execute(sql).await }
}

const INSERT_TASKS: &str =
    "INSERT INTO faena.task (id, status, state, updated_at, ended_at, due_at, approval, body, version, entered_at, events,
                             machine, title, correlation, tags)
     SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::int8[], $5::int8[], $6::int8[], $7::bool[], $8::text[],
         $9::int4[], $10::int8[], $11::int8[], $12::text[], $13::text[], $14::text[], $15::text[])";

pub const UPDATE_TASKS: &str =
    "UPDATE faena.task t SET status = c.status, state = c.state, updated_at = c.updated_at, ended_at = c.ended_at,
         due_at = c.due_at, approval = c.approval, body = c.body, version = c.version, entered_at = c.entered_at,
         events = c.events
     FROM unnest($1::uuid[], $2::text[], $3::text[], $4::int8[], $5::int8[], $6::int8[], $7::bool[], $8::text[],
         $9::int4[], $10::int8[], $11::int8[])
         AS c(id, status, state, updated_at, ended_at, due_at, approval, body, version, entered_at, events)
     WHERE t.id = c.id";

const INSERT_TAGS: &str =
    "INSERT INTO faena.task_tag (tag, task) SELECT * FROM unnest($1::text[], $2::uuid[]) ON CONFLICT DO NOTHING";

const INSERT_RECORDS: &str =
    "INSERT INTO faena.task_record (task, sequence, record) SELECT * FROM unnest($1::uuid[], $2::int8[], $3::text[])";

const INSERT_INBOX: &str =
    "INSERT INTO faena.task_inbox (task, event_id, answer) SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[])";

const INSERT_LINKS: &str = "INSERT INTO faena.task_job (job, task, name, state, epoch)
     SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int8[])";

/// Records events whether or not a subscription matches them: a service that connects later must still find them.
const INSERT_EVENTS: &str = "WITH put AS (
         INSERT INTO faena.event (id, type, subject, sequence, correlation, actor, data, at)
         SELECT *, $8::int8 FROM unnest($1::uuid[], $2::text[], $3::uuid[], $4::int8[], $5::text[], $6::text[], $7::text[])
         RETURNING position, type, subject)
     INSERT INTO faena.outbox (sink, partition, position, subject)
     SELECT s.id, get_byte(uuid_send(put.subject), 15) & 15, put.position, put.subject
     FROM put JOIN faena.subscription s
         ON s.queued AND EXISTS (SELECT FROM faena.subscription_pattern p WHERE p.subscription = s.id AND put.type LIKE p.pattern)";
