//! Tasks that the only writer of a database has in memory, so that the next event of a task need not read and parse it.
//!
//! A call takes a task out, and puts it back when everything else has succeeded. If it fails before that, the next call reads the task
//! again. The cache is cleared when a transaction is rolled back and when another connection changes the file. Every other statement
//! that changes rows of `task` must clear it too.

use std::{collections::HashMap, sync::Arc};

use faena_domain::TaskId;
use faena_machine::Definition;

use crate::TaskView;

/// Size of a generation: bytes of stored bodies. In memory a task needs a few times as much.
const GENERATION_BYTES: usize = 8 << 20;
/// Bytes that are counted for each task in addition to its body.
const OVERHEAD_BYTES: usize = 512;

/// Two generations: when the young one is full, it replaces the old one, so that tasks without events are forgotten.
#[derive(Default)]
pub struct TaskCache {
    young: HashMap<TaskId, CachedTask>,
    young_bytes: usize,
    old: HashMap<TaskId, CachedTask>,
    /// Version of the file, as the last transaction saw it.
    file_version: i64,
}

/// A task as it is stored.
#[derive(Clone)]
pub struct CachedTask {
    pub view: TaskView,
    pub definition: Arc<Definition>,
    /// Size of its stored body.
    pub body_bytes: usize,
}

impl TaskCache {
    pub fn take(&mut self, id: TaskId) -> Option<CachedTask> {
        self.young.remove(&id).or_else(|| self.old.remove(&id))
    }

    /// Keeps a task as it is stored now. Ended tasks are not kept: they get few events, and are deleted.
    pub fn put(&mut self, id: TaskId, task: CachedTask) {
        if task.view.task.status.has_ended() || task.body_bytes > GENERATION_BYTES / 8 {
            return;
        }
        if self.young_bytes > GENERATION_BYTES {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        self.young_bytes += task.body_bytes + OVERHEAD_BYTES;
        self.young.insert(id, task);
    }

    pub fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
        self.young_bytes = 0;
    }

    /// Clears the cache if another connection has changed the file.
    pub fn set_file_version(&mut self, version: i64) {
        if self.file_version != version {
            self.file_version = version;
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::Timestamp;
    use faena_machine::{BUILT_IN, create};
    use serde_json::json;

    use super::*;

    fn task(body_bytes: usize) -> CachedTask {
        let definition = Arc::new(Definition::parse(BUILT_IN[0].1).expect("a valid machine"));
        let data = json!({"prompt": "p", "repositorioOrigen": "r"});
        let first = create(&definition, "t".into(), "ana".into(), data, Timestamp::from_ms(0)).expect("valid data");
        let view = TaskView {
            machine: "coding-task".into(),
            version: 1,
            title: None,
            correlation: String::new(),
            tags: Vec::new(),
            updated_at: Timestamp::from_ms(0),
            events: 0,
            task: first.task,
        };
        CachedTask { view, definition, body_bytes }
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_the_tasks_that_were_used_last() {
        let (mut cache, task) = (TaskCache::default(), task(GENERATION_BYTES / 100));
        let ids: Vec<TaskId> = (0..500).map(|_| TaskId::new()).collect();
        for id in &ids {
            cache.put(*id, task.clone());
            assert!(cache.young.len() + cache.old.len() <= 202);
        }
        assert!(cache.take(ids[0]).is_none());
        assert!(cache.take(ids[499]).is_some());
        assert!(cache.take(ids[499]).is_none(), "a task is taken once");
        cache.put(ids[0], CachedTask { body_bytes: GENERATION_BYTES, ..task.clone() });
        assert!(cache.take(ids[0]).is_none(), "one task does not displace all others");
        cache.put(ids[0], task);
        cache.set_file_version(7);
        assert!(cache.take(ids[0]).is_none(), "another connection has written");
    }
}
