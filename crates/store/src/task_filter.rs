//! Filters over tasks.

use faena_machine::Status;
use serde::{Deserialize, Serialize};

use crate::TaskView;

/// A filter over tasks. Its JSON form, stored with a bulk action, has the field names of the API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TaskFilter {
    pub machine: Option<String>,
    pub version: Option<u32>,
    pub status: Option<Status>,
    /// A state, including the states inside it.
    pub state: Option<String>,
    #[serde(rename = "correlationId")]
    pub correlation: Option<String>,
    pub tag: Option<String>,
    /// Only tasks that wait for a decision.
    pub approval: bool,
    /// Only tasks that have not ended.
    pub open: bool,
}

impl TaskFilter {
    /// Returns whether a task matches, by the same rules as the queries of the database.
    pub fn matches(&self, view: &TaskView) -> bool {
        let state = view.task.state();
        let is_in = |wanted: &String| {
            state == *wanted || state.starts_with(&format!("{wanted}.")) || state.split('.').any(|name| name == wanted)
        };
        self.machine.as_ref().is_none_or(|machine| *machine == view.machine)
            && self.version.is_none_or(|version| version == view.version)
            && self.status.is_none_or(|status| status == view.task.status)
            && self.state.as_ref().is_none_or(is_in)
            && self.correlation.as_ref().is_none_or(|correlation| *correlation == view.correlation)
            && self.tag.as_ref().is_none_or(|tag| view.tags.contains(tag))
            && (!self.approval || view.task.approval.is_some())
            && (!self.open || !view.task.status.has_ended())
    }
}
