//! Reads and changes the tables without the store, to check what its methods do not return and to damage data.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
};

use faena_domain::{JobId, WorkerState};
use tokio::sync::OnceCell;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

/// A PostgreSQL database of one test.
pub struct ScratchDatabase {
    pub url: String,
    name: String,
    server: String,
}

impl ScratchDatabase {
    pub async fn create() -> ScratchDatabase {
        let server = std::env::var("FAENA_TEST_POSTGRES").expect("run ./test, or set FAENA_TEST_POSTGRES");
        let name = format!("faena_store_{}", uuid::Uuid::new_v4().simple());
        run_on(&server, &format!("CREATE DATABASE {name}")).await;
        // The tests do not check durability, and waiting for the disk would take most of their time.
        run_on(&server, &format!("ALTER DATABASE {name} SET synchronous_commit = off")).await;
        let mut url: url::Url = server.parse().expect("FAENA_TEST_POSTGRES is a URL");
        url.set_path(&name);
        ScratchDatabase { url: url.into(), name, server }
    }

    pub async fn drop(self) {
        run_on(&self.server, &format!("DROP DATABASE {} WITH (FORCE)", self.name)).await;
    }
}

/// Runs SQL on any database of the test server.
pub async fn run_on(url: &str, sql: &str) {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("PostgreSQL of FAENA_TEST_POSTGRES");
    let connection = tokio::spawn(connection);
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    drop(client);
    let _ = connection.await;
}

/// SQL access to the tables of a store, without the store.
#[derive(Clone)]
pub enum RawDatabase {
    Sqlite(PathBuf),
    Postgres { url: String, client: Arc<OnceCell<Client>> },
}

/// Every table with rows that belong to one job, and the columns with its id.
const TABLES: [(&str, &str); 17] = [
    ("job", "id"),
    ("ready", "id"),
    ("waiting", "id"),
    ("running", "id"),
    ("done", "id"),
    ("ended", "id"),
    ("attempt", "id"),
    ("job_log", "id"),
    ("step", "id"),
    ("progress", "id"),
    ("label", "id"),
    ("job_key", "id"),
    ("dependency", "parent"),
    ("dependency", "child"),
    ("expiry", "id"),
    ("cancel_request", "id"),
    ("key_in_flight", "id"),
];

impl RawDatabase {
    pub fn postgres(url: &str) -> RawDatabase {
        RawDatabase::Postgres { url: url.into(), client: Arc::default() }
    }

    /// Returns a connection that is separate from those of the store.
    pub async fn client(&self) -> &Client {
        let RawDatabase::Postgres { url, client } = self else { panic!("only PostgreSQL has connections") };
        client
            .get_or_init(|| async {
                let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
                tokio::spawn(connection);
                client.batch_execute("SET search_path = faena").await.unwrap();
                client
            })
            .await
    }

    /// Returns all rows as text.
    pub async fn rows(&self, sql: &str) -> Vec<Vec<String>> {
        match self {
            RawDatabase::Sqlite(path) => {
                let connection = rusqlite::Connection::open(path).unwrap();
                connection.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
                let mut statement = connection.prepare(sql).unwrap_or_else(|e| panic!("{sql}: {e}"));
                let columns = statement.column_count();
                let mut rows = statement.query([]).unwrap();
                let mut all = Vec::new();
                while let Some(row) = rows.next().unwrap() {
                    all.push((0..columns).map(|at| text(row.get_ref(at).unwrap())).collect());
                }
                all
            }
            RawDatabase::Postgres { .. } => {
                let messages = self.client().await.simple_query(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
                let row = |message: SimpleQueryMessage| match message {
                    SimpleQueryMessage::Row(row) => {
                        Some((0..row.len()).map(|at| row.get(at).unwrap_or_default().to_owned()).collect())
                    }
                    _ => None,
                };
                messages.into_iter().filter_map(row).collect()
            }
        }
    }

    pub async fn run(&self, sql: &str) {
        match self {
            RawDatabase::Sqlite(path) => {
                let connection = rusqlite::Connection::open(path).unwrap();
                connection.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
                connection.execute_batch(sql).unwrap_or_else(|e| panic!("{sql}: {e}"));
            }
            RawDatabase::Postgres { .. } => {
                self.client().await.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
            }
        }
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.rows(sql).await[0][0].parse().unwrap()
    }

    /// Returns an id as an SQL literal.
    pub fn literal(&self, id: JobId) -> String {
        match self {
            RawDatabase::Sqlite(_) => format!("x'{}'", id.0.simple()),
            RawDatabase::Postgres { .. } => format!("'{id}'::uuid"),
        }
    }

    fn hex(&self, column: &str) -> String {
        match self {
            RawDatabase::Sqlite(_) => format!("lower(hex({column}))"),
            RawDatabase::Postgres { .. } if column == "ids" => "replace(array_to_string(ids, ''), '-', '')".into(),
            RawDatabase::Postgres { .. } => format!("replace({column}::text, '-', '')"),
        }
    }

    /// Returns the tables that contain this job.
    pub async fn tables_with(&self, id: JobId) -> Vec<&'static str> {
        let mut found = Vec::new();
        for (table, column) in TABLES {
            let sql = format!("SELECT count(*) FROM {table} WHERE {column} = {}", self.literal(id));
            if self.number(&sql).await > 0 {
                found.push(table);
            }
        }
        found
    }

    /// Checks that every job is in exactly one table, every row belongs to an existing job, and the counters are right.
    pub async fn assert_consistent(&self) {
        let faults = self.faults().await;
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    async fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let id = self.hex("id");
        let jobs: HashMap<String, String> =
            self.pairs(&format!("SELECT {id}, lane FROM job")).await.into_iter().collect();
        let mut locations: HashMap<String, Vec<(&str, String, i64)>> = HashMap::new();
        for (table, sql, tally) in [
            ("ready", format!("SELECT {id}, lane FROM ready"), 1),
            ("pending", format!("SELECT {id}, lane FROM waiting WHERE state = 0"), 0),
            ("retrying", format!("SELECT {id}, lane FROM waiting WHERE state = 5"), 3),
            ("done", format!("SELECT {id}, lane FROM done"), 4),
            ("failed", format!("SELECT {id}, lane FROM ended WHERE state = 7"), 5),
            ("cancelled", format!("SELECT {id}, lane FROM ended WHERE state = 8"), 6),
        ] {
            for (id, lane) in self.pairs(&sql).await {
                locations.entry(id).or_default().push((table, lane, tally));
            }
        }
        let mut ended: HashSet<(String, String)> = HashSet::new();
        for table in ["done", "ended", "attempt"] {
            ended.extend(self.pairs(&format!("SELECT {id}, run FROM {table}")).await);
        }
        for (run, ids) in self.pairs(&format!("SELECT run, {} FROM claim", self.hex("ids"))).await {
            for at in (0..ids.len()).step_by(32) {
                let id = ids[at..at + 32].to_owned();
                if jobs.contains_key(&id) && !ended.contains(&(id.clone(), run.clone())) {
                    let lane = jobs[&id].clone();
                    locations.entry(id).or_default().push(("in flight", lane, 2));
                }
            }
        }
        let mut counted: BTreeMap<(String, i64), i64> = BTreeMap::new();
        for (id, lane) in &jobs {
            match locations.get(id).map(Vec::as_slice) {
                Some([(table, found_lane, tally)]) => {
                    if found_lane != lane {
                        faults.push(format!("job {id} of lane {lane} is in {table} of lane {found_lane}"));
                    }
                    *counted.entry((lane.clone(), *tally)).or_default() += 1;
                }
                Some(several) => faults.push(format!("job {id} is in several tables: {several:?}")),
                None => faults.push(format!("job {id} is in no table")),
            }
        }
        let mut counters: BTreeMap<(String, i64), i64> = BTreeMap::new();
        for row in self
            .rows("SELECT lane, tally, sum(n) FROM counter WHERE tally < 7 GROUP BY lane, tally HAVING sum(n) <> 0")
            .await
        {
            counters.insert((row[0].clone(), row[1].parse().unwrap()), row[2].parse().unwrap());
        }
        if counters != counted {
            faults.push(format!("counters {counters:?}, counted {counted:?}"));
        }
        for (table, column) in TABLES {
            let sql = format!("SELECT DISTINCT {} FROM {table}", self.hex(column));
            for row in self.rows(&sql).await {
                // A deleted parent may still be named by its child until the next check.
                if !jobs.contains_key(&row[0]) && (table, column) != ("dependency", "parent") {
                    faults.push(format!("{table} has rows of job {}, which does not exist", row[0]));
                }
            }
        }
        self.faults_of_key_queues(&mut faults, &locations).await;
        self.faults_of_workers(&mut faults).await;
        self.faults_of_webhooks(&mut faults).await;
        faults
    }

    /// Checks that every ready job with a key has its key queue, that the keys in flight are right, and that no key queue
    /// is closed without a reason.
    async fn faults_of_key_queues(
        &self,
        faults: &mut Vec<String>,
        locations: &HashMap<String, Vec<(&str, String, i64)>>,
    ) {
        let (id, keyed) = (self.hex("id"), if matches!(self, RawDatabase::Sqlite(_)) { "keyed = 1" } else { "keyed" });
        let lanes: HashSet<String> = self
            .rows(&format!("SELECT id FROM lane WHERE {keyed}"))
            .await
            .into_iter()
            .map(|row| row[0].clone())
            .collect();
        let key_queues: HashSet<(String, String)> =
            self.pairs("SELECT lane, key FROM key_queue").await.into_iter().collect();
        let sql = format!("SELECT {id}, lane, key FROM ready");
        for row in self.rows(&sql).await {
            let [id, lane, key] = [&row[0], &row[1], &row[2]];
            let has_key_queue = key_queues.contains(&(lane.clone(), key.clone()));
            if lanes.contains(lane) == key.is_empty() || lanes.contains(lane) != has_key_queue {
                faults
                    .push(format!("ready job {id} of lane {lane} has key {key:?}, key queue exists: {has_key_queue}"));
            }
        }
        let mut in_flight: HashSet<&String> = HashSet::new();
        for (id, locations) in locations {
            if locations.iter().any(|(table, lane, _)| *table == "in flight" && lanes.contains(lane)) {
                in_flight.insert(id);
            }
        }
        let key_rows = self.pairs(&format!("SELECT {id}, key FROM key_in_flight")).await;
        if key_rows.iter().map(|(id, _)| id).collect::<HashSet<_>>() != in_flight || key_rows.len() != in_flight.len() {
            faults.push(format!("key_in_flight has {key_rows:?}, jobs in flight are {in_flight:?}"));
        }
        let running: HashSet<&String> = key_rows.iter().map(|(_, key)| key).collect();
        let closed = if matches!(self, RawDatabase::Sqlite(_)) { "open = 0" } else { "NOT open" };
        for row in self.rows(&format!("SELECT lane, key, opens_at, limited_by FROM key_queue WHERE {closed}")).await {
            if row[3].is_empty() || (row[2].is_empty() && !running.contains(&row[1])) {
                faults.push(format!("key queue {row:?} is closed and nothing would open it"));
            }
        }
    }

    /// Checks that every live worker has a node or a deadline, that none has claims after its end, and that all state
    /// changes were allowed.
    async fn faults_of_workers(&self, faults: &mut Vec<String>) {
        for (fault, sql) in [
            ("is live but has no node and no deadline", "ended_at IS NULL AND node IS NULL AND deadline IS NULL"),
            ("has a state that contradicts its end", "(ended_at IS NULL) = (state = 6)"),
            ("has ended but has a deadline", "ended_at IS NOT NULL AND deadline IS NOT NULL"),
            ("has ended but owns claims", "ended_at IS NOT NULL AND id IN (SELECT owner FROM claim)"),
        ] {
            for row in self.rows(&format!("SELECT key FROM worker WHERE {sql}")).await {
                faults.push(format!("worker {} {fault}", row[0]));
            }
        }
        let worker = self.hex("worker");
        let mut last: HashMap<String, WorkerState> = HashMap::new();
        for (id, state) in
            self.pairs(&format!("SELECT {worker}, state FROM worker_change ORDER BY worker, sequence")).await
        {
            let state = WorkerState::ALL[state.parse::<usize>().unwrap()];
            if let Some(before) = last.insert(id.clone(), state)
                && !before.can_transition_to(state)
            {
                faults.push(format!("worker {id} went from {before} to {state}"));
            }
        }
        let id = self.hex("id");
        let current: HashMap<String, WorkerState> = self
            .pairs(&format!("SELECT {id}, state FROM worker"))
            .await
            .into_iter()
            .map(|(id, state)| (id, WorkerState::ALL[state.parse::<usize>().unwrap()]))
            .collect();
        if current != last {
            faults.push(format!("workers are {current:?}, their last recorded states are {last:?}"));
        }
    }

    /// Checks that every webhook is settled or has a due time, and that attempts have their webhook and the right number.
    async fn faults_of_webhooks(&self, faults: &mut Vec<String>) {
        for (fault, sql) in [
            (
                "webhook is open without a due time",
                "webhook WHERE state IN (0, 1) AND (due_at IS NULL OR settled_at IS NOT NULL)",
            ),
            (
                "webhook is settled but has a due time",
                "webhook WHERE state IN (2, 3) AND (due_at IS NOT NULL OR settled_at IS NULL)",
            ),
            (
                "webhook is being sent without a node, or has a node without being sent",
                "webhook WHERE (state = 1) <> (node IS NOT NULL)",
            ),
            (
                "webhook has an attempt count that differs from its stored attempts",
                "webhook w WHERE attempts - (CASE WHEN state = 1 THEN 1 ELSE 0 END)
                     <> (SELECT count(*) FROM webhook_attempt a WHERE a.webhook = w.id)",
            ),
            ("attempt has no webhook", "webhook_attempt WHERE webhook NOT IN (SELECT id FROM webhook)"),
        ] {
            let count = self.number(&format!("SELECT count(*) FROM {sql}")).await;
            if count > 0 {
                faults.push(format!("{count} times: {fault}"));
            }
        }
    }

    async fn pairs(&self, sql: &str) -> Vec<(String, String)> {
        self.rows(sql).await.into_iter().map(|row| (row[0].clone(), row[1].clone())).collect()
    }
}

fn text(value: rusqlite::types::ValueRef<'_>) -> String {
    use rusqlite::types::ValueRef::*;
    match value {
        Null => String::new(),
        Integer(n) => n.to_string(),
        Real(x) => x.to_string(),
        Text(bytes) | Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
    }
}
