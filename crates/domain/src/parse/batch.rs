//! Parses a batch: several jobs that may depend on each other by `ref`.

use std::collections::HashMap;

use serde_json::value::RawValue;

use super::{Fields, JobParser, ParseError};
use crate::{FieldError, JobId, NewJob};

/// Parsing a batch stops after this many errors, so that the response stays small.
const MAX_ERRORS: usize = 100;

impl JobParser {
    /// Parses a body that holds a batch, gives each job a new id, and replaces refs by ids.
    ///
    /// Fails if any job is not valid, or if a ref is unknown, used twice, or part of a cycle.
    pub fn parse_batch(&self, body: &[u8]) -> Result<Vec<NewJob>, ParseError> {
        let mut fields = Fields::parse(body, self.limits.max_batch_bytes)?;
        let raw = fields.raw("jobs");
        let mut errors = fields.finish();
        let list = self.job_list(raw).unwrap_or_else(|message| {
            errors.push(FieldError::new("jobs", message));
            Vec::new()
        });
        let mut jobs = Vec::with_capacity(list.len());
        for (index, raw) in list.into_iter().enumerate() {
            match Fields::nested(raw, format!("jobs[{index}].")) {
                Ok(fields) => jobs.push(self.parse_job(fields, JobId::new(), &mut errors)),
                Err(error) => errors.push(error),
            }
            if errors.len() >= MAX_ERRORS {
                break;
            }
        }
        errors.extend(self.check_dependencies(&jobs));
        if errors.is_empty() {
            errors = resolve_refs(&mut jobs);
        }
        if errors.is_empty() { Ok(jobs) } else { Err(ParseError::Invalid(errors)) }
    }

    /// Returns an error if the jobs have too many dependencies together.
    fn check_dependencies(&self, jobs: &[NewJob]) -> Option<FieldError> {
        let max = self.limits.max_batch_depends_on;
        let count: usize = jobs.iter().map(|job| job.options.depends_on.len() + job.depends_on_refs.len()).sum();
        let message = format!(
            "the jobs have {count} dependencies together, and a batch may have {max}; submit several batches, or add a job that waits \
             for many others and depend on that one"
        );
        (count > max).then(|| FieldError::new("jobs", message))
    }

    fn job_list<'a>(&self, raw: Option<&'a RawValue>) -> Result<Vec<&'a RawValue>, String> {
        let list = raw.and_then(|raw| serde_json::from_str::<Vec<&RawValue>>(raw.get()).ok());
        let list = list.ok_or("must be a list of jobs")?;
        let max = self.limits.max_batch;
        match list.len() {
            0 => Err("must not be empty".into()),
            count if count > max => Err(format!("must have at most {max} jobs, has {count}")),
            _ => Ok(list),
        }
    }
}

/// Looks up the refs of each job, and adds the ids of the jobs that they name to its dependencies.
fn resolve_refs(jobs: &mut [NewJob]) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut by_ref: HashMap<String, usize> = HashMap::new();
    for (index, job) in jobs.iter().enumerate() {
        if let Some(name) = &job.reference
            && by_ref.insert(name.clone(), index).is_some()
        {
            let message = format!("\"{name}\" is already the ref of another job");
            errors.push(FieldError::new(format!("jobs[{index}].ref"), message));
        }
    }
    let mut parents: Vec<Vec<usize>> = Vec::with_capacity(jobs.len());
    for (index, job) in jobs.iter().enumerate() {
        let mut known = Vec::new();
        for name in &job.depends_on_refs {
            match by_ref.get(name) {
                Some(parent) => known.push(*parent),
                None => errors.push(FieldError::new(
                    format!("jobs[{index}].dependsOn"),
                    format!("\"{name}\" is neither a job id nor a ref in this batch"),
                )),
            }
        }
        parents.push(known);
    }
    if let Some(index) = find_cycle(&parents) {
        let message = "depends on itself, directly or through other jobs";
        errors.push(FieldError::new(format!("jobs[{index}].dependsOn"), message));
    }
    if errors.is_empty() {
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
        for (job, parents) in jobs.iter_mut().zip(parents) {
            job.options.depends_on.extend(parents.into_iter().map(|parent| ids[parent]));
        }
    }
    errors
}

/// Returns the first job that is part of a cycle or depends on one.
///
/// Removes jobs without open dependencies until none is left; the rest cannot be ordered. Does not recurse, because a
/// chain may be as long as a batch.
fn find_cycle(parents: &[Vec<usize>]) -> Option<usize> {
    let mut open: Vec<usize> = parents.iter().map(Vec::len).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); parents.len()];
    for (child, list) in parents.iter().enumerate() {
        for parent in list {
            children[*parent].push(child);
        }
    }
    let mut free: Vec<usize> = (0..parents.len()).filter(|index| open[*index] == 0).collect();
    while let Some(parent) = free.pop() {
        for child in &children[parent] {
            open[*child] -= 1;
            if open[*child] == 0 {
                free.push(*child);
            }
        }
    }
    open.iter().position(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(body: &str) -> Vec<String> {
        match JobParser::default().parse_batch(body.as_bytes()) {
            Ok(_) => Vec::new(),
            Err(ParseError::Invalid(errors)) => errors.iter().map(ToString::to_string).collect(),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn refs_become_ids() {
        let body = r#"{"jobs":[{"name":"noop","ref":"a"},{"name":"noop","dependsOn":["a"]}]}"#;
        let jobs = JobParser::default().parse_batch(body.as_bytes()).expect("a valid batch");
        assert_eq!(jobs[1].options.depends_on, [jobs[0].id]);
    }

    #[test]
    fn cycles_and_unknown_or_repeated_refs_are_rejected() {
        let cycle = ["jobs[0].dependsOn: depends on itself, directly or through other jobs"];
        assert_eq!(
            errors(r#"{"jobs":[{"name":"a","ref":"a","dependsOn":["b"]},{"name":"b","ref":"b","dependsOn":["a"]}]}"#),
            cycle
        );
        assert_eq!(errors(r#"{"jobs":[{"name":"a","ref":"a","dependsOn":["a"]}]}"#), cycle);
        assert_eq!(
            errors(r#"{"jobs":[{"name":"a","ref":"x"},{"name":"b","ref":"x","dependsOn":["y"]}]}"#),
            [
                "jobs[1].ref: \"x\" is already the ref of another job",
                "jobs[1].dependsOn: \"y\" is neither a job id nor a ref in this batch"
            ]
        );
    }

    #[test]
    fn a_batch_with_too_many_dependencies_is_rejected() {
        let refs: Vec<String> = (0..200).map(|n| format!("\"r{n}\"")).collect();
        let parents = (0..200).map(|n| format!(r#"{{"name":"a","ref":"r{n}"}}"#));
        let children = (0..101).map(|_| format!(r#"{{"name":"a","dependsOn":[{}]}}"#, refs.join(",")));
        let jobs: Vec<String> = parents.chain(children).collect();
        let found = errors(&format!(r#"{{"jobs":[{}]}}"#, jobs.join(",")));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("jobs: the jobs have 20200 dependencies together, and a batch may have 20000"));
        assert!(errors(&format!(r#"{{"jobs":[{}]}}"#, jobs[..300].join(","))).is_empty());
    }

    #[test]
    fn a_long_chain_is_not_a_cycle() {
        let jobs: Vec<String> = (0..5_000)
            .map(|n| {
                if n == 0 {
                    r#"{"name":"a","ref":"r0"}"#.into()
                } else {
                    format!(r#"{{"name":"a","ref":"r{n}","dependsOn":["r{}"]}}"#, n - 1)
                }
            })
            .collect();
        assert_eq!(errors(&format!(r#"{{"jobs":[{}]}}"#, jobs.join(","))), Vec::<String>::new());
    }
}
