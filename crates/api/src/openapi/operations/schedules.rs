//! Operations below `/schedules`.

use faena_domain::{
    parse::schema::{boolean, integer, time, uuid, with_default},
    schedule::ScheduleView,
};
use faena_wire::{CreatedSchedule, RunList, ScheduleList, Success, TickList, Triggered, ValidSchedule};
use serde_json::json;

use crate::openapi::{
    operation::{Operation, Tag},
    requests::{self, filter_text, search_text},
};

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Schedules, id, summary)
}

fn on_schedule(id: &'static str, summary: &'static str) -> Operation {
    operation(id, summary).path("id", uuid(), "Id of the schedule.")
}

pub fn create() -> Operation {
    let example = json!({
        "name": "daily-report",
        "cronExpression": "0 9 * * 1-5",
        "timezone": "Europe/Madrid",
        "jobType": "report.build",
        "jobPayload": {"day": "{{due.date}}"},
    });
    operation("createSchedule", "Create a schedule")
        .about("Set either `cronExpression` or `intervalMs`.")
        .body("NewSchedule", requests::new_schedule, example)
        .created::<CreatedSchedule>("The schedule is stored.")
        .link("getSchedule", "id", "/id")
        .link("patchSchedule", "id", "/id")
        .link("triggerSchedule", "id", "/id")
        .link("previewSchedule", "id", "/id")
        .link("disableSchedule", "id", "/id")
        .link("deleteSchedule", "id", "/id")
}

pub fn list() -> Operation {
    operation("listSchedules", "List schedules by name")
        .query("isActive", boolean(), "Only active or only inactive schedules.")
        .query("enabled", boolean(), "The same as `isActive`.")
        .query("name", filter_text(), "Exactly this name.")
        .query("q", search_text(), "A part of the name.")
        .list::<ScheduleList>("A page of schedules.")
}

pub fn validate() -> Operation {
    let example = json!({"name": "nightly", "cronExpression": "30 2 * * *", "jobType": "backup"});
    operation("validateSchedule", "Check a schedule without storing it")
        .about("Answers with the errors of `POST /api/v1/schedules`, or with the next due times.")
        .body("NewSchedule", requests::new_schedule, example)
        .ok::<ValidSchedule>("It is valid.")
}

pub fn show() -> Operation {
    on_schedule("getSchedule", "Show a schedule with its latest ten jobs").ok::<ScheduleView>("The schedule.")
}

pub fn patch() -> Operation {
    on_schedule("patchSchedule", "Change a schedule")
        .about("An absent field is not changed; `null` restores the default.")
        .body("SchedulePatch", requests::schedule_patch, json!({"cronExpression": "0 10 * * 1-5"}))
        .ok::<ScheduleView>("The changed schedule.")
}

pub fn delete() -> Operation {
    on_schedule("deleteSchedule", "Delete a schedule")
        .about("Its jobs are kept.")
        .ok::<Success>("The schedule is deleted.")
}

pub fn trigger() -> Operation {
    on_schedule("triggerSchedule", "Create a job of a schedule now")
        .about("Works for an inactive schedule too.")
        .created::<Triggered>("The job is stored.")
        .link("getJob", "id", "/jobId")
}

pub fn enable() -> Operation {
    on_schedule("enableSchedule", "Enable a schedule").ok::<ScheduleView>("The schedule.")
}

pub fn disable() -> Operation {
    on_schedule("disableSchedule", "Disable a schedule").ok::<ScheduleView>("The schedule.")
}

pub fn preview() -> Operation {
    previewed("previewSchedule", "Preview the due times of a schedule")
}

pub fn next_runs() -> Operation {
    previewed("getNextRuns", "Show the next due times of a schedule")
}

fn previewed(id: &'static str, summary: &'static str) -> Operation {
    on_schedule(id, summary)
        .about("Calculates the due times as if the schedule were active. `/preview` and `/next-runs` are the same.")
        .query("count", with_default(integer(1, 1_000), 10), "Number of due times.")
        .ok::<RunList>("The due times.")
}

pub fn ticks() -> Operation {
    on_schedule("listTicks", "List what happened at past due times, latest first")
        .query("before", time(), "Due times earlier than this.")
        .list::<TickList>("A page of ticks.")
}
