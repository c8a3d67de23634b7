//! The dependency graph around a job.

use std::time::Instant;

use faena_domain::{JobGraph, JobId, JobState, NewJob};
use faena_store::Retention;

use crate::support::*;

async fn graph(fixture: &Fixture, id: JobId, limit: usize) -> JobGraph {
    fixture.store.job_graph(id, None, limit).await.unwrap().unwrap()
}

/// Returns the jobs of a graph with their distances.
fn jobs(graph: &JobGraph) -> Vec<(JobId, i32)> {
    graph.jobs.iter().map(|job| (job.id, job.depth)).collect()
}

pub async fn a_job_shows_what_it_depends_on_and_what_depends_on_it(fixture: &Fixture) {
    let named = NewJob { queue: "mail".into(), ..fixture.job("root", 0) };
    let root = fixture.submit(named).await;
    let left = fixture.submit(fixture.job("left", 1).after(&[root])).await;
    let right = fixture.submit(fixture.job("right", 2).after(&[root])).await;
    let end = fixture.submit(fixture.job("end", 3).after(&[left, right, root])).await;
    fixture.submit(fixture.job("other", 4)).await;

    let around = graph(fixture, left, 60).await;
    assert_eq!(jobs(&around), [(left, 0), (root, -1), (end, 1)], "not its sibling");
    assert_eq!(around.jobs[2].depends_on, [root, left]);
    assert_eq!((around.jobs[2].hidden_parents, around.jobs[1].hidden_children), (1, 1), "the sibling is not shown");
    assert_eq!((around.hidden, around.hidden_is_exact), (2, true));

    let all = graph(fixture, root, 60).await;
    assert_eq!(jobs(&all), [(root, 0), (left, 1), (right, 1), (end, 1)]);
    assert_eq!((all.hidden, all.jobs[3].depends_on.clone()), (0, vec![root, left, right]));
    let shown = &all.jobs[0];
    assert_eq!(
        (shown.name.as_deref(), shown.kind.as_deref(), shown.queue.as_deref(), shown.status),
        (Some("root"), Some("root"), Some("mail"), Some(JobState::Queued))
    );
    assert_eq!(all.jobs[3].status, Some(JobState::Pending));
}

pub async fn links_to_finished_jobs_stay_until_a_job_is_deleted(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let early = fixture.submit(fixture.job("early", 1).after(&[parent.id])).await;
    fixture.complete(&parent, 2).await;
    let late = fixture.submit(fixture.job("late", 3).after(&[parent.id])).await;
    let around = graph(fixture, parent.id, 60).await;
    assert_eq!(jobs(&around), [(parent.id, 0), (early, 1), (late, 1)]);
    assert_eq!(around.jobs[0].status, Some(JobState::Completed));
    fixture.store.job_delete(late, None, fixture.at(4)).await.unwrap();
    assert_eq!(jobs(&graph(fixture, parent.id, 60).await), [(parent.id, 0), (early, 1)]);

    let retention = Retention { completed_ms: 0, ..Retention::default() };
    fixture.store.job_prune(&retention, 100, fixture.at(1_000)).await.unwrap();
    let around = graph(fixture, early, 60).await;
    assert_eq!(jobs(&around), [(early, 0), (parent.id, -1)]);
    assert_eq!((around.jobs[1].status, around.jobs[1].name.clone()), (None, None), "it was deleted");
    let labels = fixture.database.number("SELECT count(*) FROM label").await;
    assert_eq!(labels, 1, "deleted jobs leave no links behind");
}

pub async fn near_jobs_come_first_and_the_rest_is_counted(fixture: &Fixture) {
    let parents = fixture.submit_all((0..30).map(|_| fixture.job("parent", 0)).collect()).await;
    let job = fixture.submit(fixture.job("job", 1).after(&parents)).await;
    let children = fixture.submit_all((0..30).map(|_| fixture.job("child", 2).after(&[job])).collect()).await;
    fixture.submit(fixture.job("grandchild", 3).after(&children[..1])).await;
    let around = graph(fixture, job, 21).await;
    let count = |depth: i32| around.jobs.iter().filter(|job| job.depth == depth).count();
    assert_eq!((around.jobs.len(), count(-1), count(1), count(2)), (21, 10, 10, 0));
    assert_eq!((around.jobs[0].hidden_parents, around.jobs[0].hidden_children), (20, 20));
    assert_eq!((around.hidden, around.hidden_is_exact), (41, true), "with the grandchild");
    assert_eq!(graph(fixture, job, 200).await.jobs.len(), 62);
}

pub async fn a_job_with_ten_thousand_children_shows_some_of_them(fixture: &Fixture) {
    let hub = fixture.submit(fixture.job("hub", 0)).await;
    let second = fixture.submit(fixture.job("hub", 0)).await;
    for _ in 0..10 {
        fixture.submit_all((0..1_000).map(|_| fixture.job("child", 1).after(&[hub, second])).collect()).await;
    }
    let start = Instant::now();
    let around = graph(fixture, hub, 60).await;
    println!("a graph of a job with 10 000 children took {:?}", start.elapsed());
    assert_eq!((around.jobs.len(), around.jobs[0].hidden_children), (60, 9_941));
    assert!(around.hidden_is_exact);
    assert!(around.jobs[1..].iter().all(|job| job.hidden_parents == 1), "the second hub is not shown");
    let child = around.jobs[1].id;
    let of_child = graph(fixture, child, 60).await;
    assert_eq!(jobs(&of_child), [(child, 0), (hub, -1), (second, -1)]);
    assert_eq!((of_child.hidden, of_child.hidden_is_exact), (2 * 999, false), "counted up to 1 000 each");
}

pub async fn a_long_chain_is_followed_in_both_directions(fixture: &Fixture) {
    let mut chain = vec![fixture.submit(fixture.job("link", 0)).await];
    for _ in 1..80 {
        let last = chain[chain.len() - 1];
        chain.push(fixture.submit(fixture.job("link", 1).after(&[last])).await);
    }
    let middle = graph(fixture, chain[40], 21).await;
    let mut depths: Vec<i32> = middle.jobs.iter().map(|job| job.depth).collect();
    depths.sort_unstable();
    assert_eq!(depths, (-10..=10).collect::<Vec<i32>>());
    assert_eq!(middle.hidden, 2);
    let end = graph(fixture, chain[79], 60).await;
    assert_eq!((end.jobs.len(), end.hidden), (60, 1), "one direction gets what the other leaves");
}

pub async fn jobs_of_other_queues_are_in_no_graph(fixture: &Fixture) {
    let queued = |queue: &str, job: NewJob| NewJob { queue: queue.into(), ..job };
    let secret = fixture.submit(queued("secret", fixture.job("secret", 0))).await;
    let job = fixture.submit(queued("mail", fixture.job("job", 1).after(&[secret]))).await;
    let secrets = (0..100).map(|_| queued("secret", fixture.job("child", 2).after(&[job])));
    fixture.submit_all(secrets.collect()).await;
    let child = fixture.submit(queued("mail", fixture.job("child", 3).after(&[job]))).await;
    let mine = Some(vec!["mail".to_owned()]);
    let around = fixture.store.job_graph(job, mine.clone(), 60).await.unwrap().unwrap();
    assert_eq!(jobs(&around), [(job, 0), (child, 1)]);
    assert_eq!(around.jobs[0].hidden_children, 0);
    assert_eq!(fixture.store.job_graph(secret, mine, 60).await.unwrap(), None);
    assert_eq!(graph(fixture, job, 200).await.jobs.len(), 103);
}

pub async fn an_unknown_job_has_no_graph(fixture: &Fixture) {
    assert_eq!(fixture.store.job_graph(JobId::new(), None, 60).await.unwrap(), None);
}
