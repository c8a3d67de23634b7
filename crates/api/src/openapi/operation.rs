//! The documentation of one operation. A route cannot be declared without it.

use faena_domain::{
    JobLimits,
    parse::schema::{about, integer, with_default},
};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

/// Returns the schema of an answer; a named type is added to the definitions of the generator.
pub type AnswerSchema = fn(&mut SchemaGenerator) -> Value;
/// Returns the schema of a request body, with the limits of this installation.
pub type BodySchema = fn(&JobLimits) -> Value;

/// Group of operations in the document.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tag {
    Jobs,
    BulkActions,
    DeadLetters,
    Schedules,
    Tasks,
    Machines,
    Queues,
    Limits,
    Workers,
    WorkerProtocol,
    Webhooks,
    Events,
    Outbox,
    ApiKeys,
    Audit,
    Metrics,
    System,
}

impl Tag {
    pub const ALL: [Tag; 17] = [
        Tag::Jobs,
        Tag::BulkActions,
        Tag::DeadLetters,
        Tag::Schedules,
        Tag::Tasks,
        Tag::Machines,
        Tag::Queues,
        Tag::Limits,
        Tag::Workers,
        Tag::WorkerProtocol,
        Tag::Webhooks,
        Tag::Events,
        Tag::Outbox,
        Tag::ApiKeys,
        Tag::Audit,
        Tag::Metrics,
        Tag::System,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Tag::Jobs => "Jobs",
            Tag::BulkActions => "Bulk actions",
            Tag::DeadLetters => "Dead letters",
            Tag::Schedules => "Schedules",
            Tag::Tasks => "Tasks",
            Tag::Machines => "Machines",
            Tag::Queues => "Queues",
            Tag::Limits => "Limits",
            Tag::Workers => "Workers",
            Tag::WorkerProtocol => "Worker protocol",
            Tag::Webhooks => "Webhooks",
            Tag::Events => "Events and traces",
            Tag::Outbox => "Outbox",
            Tag::ApiKeys => "API keys",
            Tag::Audit => "Audit log",
            Tag::Metrics => "Metrics and history",
            Tag::System => "Health, metrics and documentation",
        }
    }

    pub fn description(self) -> &'static str {
        match self {
            Tag::Jobs => "Submit, list, show, change, cancel, retry and delete jobs.",
            Tag::BulkActions => "Apply one action to every job that a filter matches.",
            Tag::DeadLetters => "Jobs that failed permanently.",
            Tag::Schedules => "Create jobs at set times: cron expressions in a time zone, or fixed intervals.",
            Tag::Tasks => "Create tasks, send them events, and decide on them.",
            Tag::Machines => "The state machines that tasks run.",
            Tag::Queues => "Show, configure, pause and resume queues.",
            Tag::Limits => "Limits on the concurrency and the rate of jobs.",
            Tag::Workers => "Show and drain workers.",
            Tag::WorkerProtocol => "How a worker registers, receives jobs and reports on them.",
            Tag::Webhooks => "Notifications about finished jobs, and how their delivery went.",
            Tag::Events => "Follow what happens, live or by correlation id.",
            Tag::Outbox => "Sinks that receive events, sources and inboxes that create jobs, and rejected events.",
            Tag::ApiKeys => "Create, list, rotate and revoke API keys.",
            Tag::Audit => "Every change by a caller.",
            Tag::Metrics => "Metrics of the whole cluster, and what happened per minute, hour and day.",
            Tag::System => "For load balancers, monitoring and clients.",
        }
    }
}

/// Documentation of one operation. The route adds its method, path and scope.
#[derive(Clone, Debug)]
pub struct Operation {
    pub id: &'static str,
    pub tag: Tag,
    pub summary: &'static str,
    pub description: String,
    pub parameters: Vec<Parameter>,
    pub body: Option<RequestBody>,
    pub answers: Vec<Answer>,
    /// Status and meaning of errors that are special to this operation.
    pub errors: Vec<(u16, &'static str)>,
}

#[derive(Clone, Debug)]
pub struct Parameter {
    pub name: &'static str,
    /// `path`, `query` or `header`.
    pub location: &'static str,
    pub schema: Value,
    pub is_required: bool,
}

#[derive(Clone, Debug)]
pub struct RequestBody {
    /// Name of the schema in the document.
    pub name: &'static str,
    pub schema: BodySchema,
    pub example: Value,
    pub is_required: bool,
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub description: &'static str,
    pub content: Content,
    /// Names of headers in the components of the document.
    pub headers: Vec<&'static str>,
    pub links: Vec<Link>,
}

#[derive(Clone, Debug)]
pub enum Content {
    Empty,
    Json(AnswerSchema),
    /// Text of one of these media types.
    Text(&'static [&'static str]),
    /// Server-sent events whose data has this schema.
    Events(AnswerSchema),
}

/// Operation that can be called with a value of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub operation: &'static str,
    pub parameter: &'static str,
    /// JSON pointer into the answer.
    pub pointer: &'static str,
}

/// Headers of every list.
pub const LIST_HEADERS: [&str; 8] = [
    "X-Total-Count",
    "X-Limit",
    "X-Total-Pages",
    "X-Page",
    "X-Next-Cursor",
    "X-Total-Is-Exact",
    "X-Sort-Is-Exact",
    "X-Is-Partial",
];

impl Operation {
    pub fn new(tag: Tag, id: &'static str, summary: &'static str) -> Operation {
        Operation {
            id,
            tag,
            summary,
            description: String::new(),
            parameters: Vec::new(),
            body: None,
            answers: Vec::new(),
            errors: Vec::new(),
        }
    }

    pub fn about(mut self, description: impl Into<String>) -> Operation {
        self.description = description.into();
        self
    }

    pub fn path(self, name: &'static str, schema: Value, description: &str) -> Operation {
        self.parameter("path", name, about(schema, description))
    }

    pub fn query(self, name: &'static str, schema: Value, description: &str) -> Operation {
        self.parameter("query", name, about(schema, description))
    }

    pub fn header(self, name: &'static str, schema: Value, description: &str) -> Operation {
        self.parameter("header", name, about(schema, description))
    }

    /// Documents the header that is the same as `idempotencyKey` in the body.
    pub fn idempotency_key(self) -> Operation {
        let key = json!({"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[\\x21-\\x7e]+$"});
        self.header("Idempotency-Key", key, "The same as `idempotencyKey` in the body.")
    }

    pub fn required_header(mut self, name: &'static str, schema: Value, description: &str) -> Operation {
        let schema = about(schema, description);
        self.parameters.push(Parameter { name, location: "header", schema, is_required: true });
        self
    }

    fn parameter(mut self, location: &'static str, name: &'static str, schema: Value) -> Operation {
        self.parameters.push(Parameter { name, location, schema, is_required: location == "path" });
        self
    }

    pub fn body(mut self, name: &'static str, schema: BodySchema, example: Value) -> Operation {
        self.body = Some(RequestBody { name, schema, example, is_required: true });
        self
    }

    /// Documents a body that may be empty.
    pub fn optional_body(mut self, name: &'static str, schema: BodySchema, example: Value) -> Operation {
        self.body = Some(RequestBody { name, schema, example, is_required: false });
        self
    }

    pub fn answer(mut self, status: u16, description: &'static str, content: Content) -> Operation {
        self.answers.push(Answer { status, description, content, headers: Vec::new(), links: Vec::new() });
        self
    }

    pub fn ok<T: JsonSchema>(self, description: &'static str) -> Operation {
        self.json::<T>(200, description)
    }

    pub fn json<T: JsonSchema>(self, status: u16, description: &'static str) -> Operation {
        self.answer(status, description, Content::Json(schema_of::<T>))
    }

    /// Documents 201 with the location of what was created.
    pub fn created<T: JsonSchema>(self, description: &'static str) -> Operation {
        self.json::<T>(201, description).with_header("Location")
    }

    /// Adds a header to the last answer.
    pub fn with_header(mut self, name: &'static str) -> Operation {
        if let Some(answer) = self.answers.last_mut() {
            answer.headers.push(name);
        }
        self
    }

    /// Adds a link from the last answer to another operation.
    pub fn link(mut self, operation: &'static str, parameter: &'static str, pointer: &'static str) -> Operation {
        if let Some(answer) = self.answers.last_mut() {
            answer.links.push(Link { operation, parameter, pointer });
        }
        self
    }

    /// Documents an error that is special to this operation.
    pub fn error(mut self, status: u16, description: &'static str) -> Operation {
        self.errors.push((status, description));
        self
    }

    pub fn conflict(self, description: &'static str) -> Operation {
        self.error(409, description)
    }

    /// Documents a list that can have millions of entries, such as jobs: its pages are small.
    pub fn list<T: JsonSchema>(self, description: &'static str) -> Operation {
        self.paged(20, 100).listed::<T>(description)
    }

    /// Documents a list with few entries, such as queues: one page usually has all of them.
    pub fn short_list<T: JsonSchema>(self, description: &'static str) -> Operation {
        self.paged(100, 1_000).listed::<T>(description)
    }

    fn paged(self, default: u64, max: u64) -> Operation {
        self.query("limit", with_default(integer(1, max), default), "Entries per page.")
            .query(
                "page",
                with_default(integer(1, 1_000_000), 1),
                "Number of the page. Pages reach the 10 000th entry; `cursor` reaches all. Not with `cursor`.",
            )
            .query(
                "cursor",
                json!({"type": "string"}),
                "Empty to begin, then `nextCursor` of the previous answer. Not with `page`.",
            )
    }

    /// Documents the page of a list, without the parameters that choose it.
    pub fn listed<T: JsonSchema>(mut self, description: &'static str) -> Operation {
        self = self.ok::<T>(description);
        LIST_HEADERS.into_iter().fold(self, Operation::with_header)
    }
}

pub fn schema_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}
