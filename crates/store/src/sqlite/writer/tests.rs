#![expect(clippy::unwrap_used, reason = "a panic shows the line of the failed step")]

use std::sync::mpsc;

use super::*;
use crate::{StoreOptions, sqlite::Sqlite};

type TestCall = Box<dyn FnOnce(&Tx) -> Result<()> + Send>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_while_the_transaction_is_lost_is_run_in_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.db");
    let store = Arc::new(Sqlite::open(path.to_str().unwrap(), StoreOptions::default()).await.unwrap());
    let (release, released) = mpsc::channel();
    let (started_sender, started) = oneshot::channel();
    let spawn = |work: TestCall| {
        let store = store.clone();
        tokio::spawn(async move { store.writer.call(work).await })
    };
    let before = spawn(Box::new(move |_| {
        started_sender.send(()).unwrap();
        released.recv().unwrap();
        Ok(())
    }));
    started.await.unwrap();
    let losing = spawn(Box::new(|tx| {
        tx.connection.execute_batch("ROLLBACK").unwrap();
        Ok(())
    }));
    wait_until_queued(&store.writer, 1).await;
    let after = spawn(Box::new(|_| Ok(())));
    wait_until_queued(&store.writer, 2).await;
    release.send(()).unwrap();
    assert!(matches!(before.await.unwrap(), Err(StoreError::Unavailable(_))));
    assert!(matches!(losing.await.unwrap(), Err(StoreError::Unavailable(_))));
    after.await.unwrap().expect("a call that was not in the lost transaction succeeds");
}

/// Waits until `count` calls wait for the writer thread.
async fn wait_until_queued(writer: &Writer, count: usize) {
    let calls = writer.calls.lock().clone().unwrap();
    while calls.small.capacity() != MAX_WAITING_CALLS - count {
        tokio::task::yield_now().await;
    }
}
