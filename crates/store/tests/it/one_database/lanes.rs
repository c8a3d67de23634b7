//! Lanes that one node reclaims while another node has them in its cache.

use crate::{bounds::reclaim, support::*};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_knows_a_reclaimed_lane_submits_to_a_new_one_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let id = fixture.submit(fixture.job("a", 0)).await;
        let other = fixture.reopen(faena_store::StoreOptions::default()).await;
        let deleted_lane = other.lane_of(id).await.id;
        fixture.store.job_delete(id, None, fixture.at(1)).await.unwrap();
        reclaim(fixture, 1).await;
        assert_eq!(fixture.database.number("SELECT count(*) FROM lane").await, 0);
        // The other node still has the deleted lane in its cache.
        let ready = other.submit(other.job("a", 2)).await;
        let lane = other.lane_of(ready).await.id;
        assert_ne!(lane, deleted_lane);
        assert_eq!(fixture.claim_lanes(fixture.node, vec![lane], 1, 3).await.len(), 1);
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_is_kept_while_a_transaction_may_add_jobs_to_it_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let id = fixture.submit(fixture.job("a", 0)).await;
        let lane = fixture.lane_of(id).await.id;
        fixture.store.job_delete(id, None, fixture.at(1)).await.unwrap();
        let (client, connection) = tokio_postgres::connect(&fixture.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute(&format!("BEGIN; SELECT faena.require_lanes(ARRAY[{lane}])")).await.unwrap();
        for _ in 0..5 {
            assert_eq!(fixture.store.lane_reclaim(10).await.unwrap(), 0, "the transaction has not ended");
        }
        client.batch_execute("COMMIT").await.unwrap();
        assert_eq!(reclaim(fixture, 1).await, 1);
        let refused = client.batch_execute(&format!("SELECT faena.require_lanes(ARRAY[{lane}])")).await;
        assert_eq!(refused.unwrap_err().code().map(|code| code.code().to_owned()), Some("FA001".into()));
    })
    .await;
}
