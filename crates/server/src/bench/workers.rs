//! Measures remote workers: the drain through four of them per transport, compared with the built-in worker, and the server's
//! memory per connected worker.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use faena_wire::v1::{
    Complete, ConnectRequest, Register, connect_request::Message as Outgoing, connect_response::Message as Incoming,
    worker_service_client::WorkerServiceClient,
};
use futures_util::{SinkExt, StreamExt};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use super::{
    drain::{self, CompletionCounter},
    http_load::Target,
    report::Report,
    scratch::Scratch,
    submit,
};

const JOBS: usize = 100_000;
const WORKERS: usize = 4;
const CONCURRENCY: u32 = 500;
const JOB_TYPE: &str = "bench.remote";
const CONNECTED: usize = 1_000;

pub async fn workers(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: the built-in worker"));
    let url = scratch.fresh().await?;
    submit::fill(&url, JOBS).await?;
    let built_in = drain::drain(scratch, &url, JOBS).await?.rate;
    report.plain(database, "drain, built-in worker", built_in, "jobs/s");

    report.step(&format!("{database}: {WORKERS} remote workers with {CONCURRENCY} slots each"));
    let by_websocket = remote(scratch, WorkerKind::WebSocket).await?;
    report.against(database, "drain, 4 workers by WebSocket (SDK)", by_websocket, "jobs/s", built_in, Some(0.4));
    let by_grpc = remote(scratch, WorkerKind::Grpc).await?;
    report.against(database, "drain, 4 workers by gRPC", by_grpc, "jobs/s", built_in, Some(0.4));

    report.step(&format!("{database}: {CONNECTED} connected workers"));
    let kib = memory(&scratch.fresh().await?).await?;
    report.plain(database, "memory per connected WebSocket worker", kib, "KiB");
    let by_many = remote(scratch, WorkerKind::SingleSlot).await?;
    report.against(database, "drain, 1000 workers with one slot, WebSocket", by_many, "jobs/s", built_in, None);
    Ok(())
}

#[derive(Clone, Copy)]
enum WorkerKind {
    WebSocket,
    Grpc,
    /// Workers with one slot, as a simple script would be.
    SingleSlot,
}

async fn remote(scratch: &mut Scratch, kind: WorkerKind) -> Result<f64> {
    let url = scratch.fresh().await?;
    submit::fill_with_type(&url, JOBS, JOB_TYPE).await?;
    let target = Target::faena(&url).await?;
    let counter = CompletionCounter::connect(scratch, &url).await?;
    let stop = CancellationToken::new();
    let mut tasks = Vec::new();
    let count = if matches!(kind, WorkerKind::SingleSlot) { CONNECTED } else { WORKERS };
    for _ in 0..count {
        let (stop, address) = (stop.clone(), format!("http://{}", target.address));
        tasks.push(tokio::spawn(async move {
            match kind {
                WorkerKind::WebSocket => sdk_worker(address, stop).await,
                WorkerKind::Grpc => grpc_worker(address, stop).await,
                WorkerKind::SingleSlot => single_slot_worker(address, stop).await,
            }
        }));
    }
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut first = 0;
    while first == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        first = counter.completed().await?;
        ensure!(Instant::now() < deadline, "no job completed within 120 s");
    }
    let started = Instant::now();
    let mut done = first;
    while done < JOBS {
        tokio::time::sleep(Duration::from_millis(5)).await;
        done = counter.completed().await?;
        ensure!(Instant::now() < deadline, "timed out after 120 s: {done} of {JOBS} jobs completed");
    }
    let rate = (done - first) as f64 / started.elapsed().as_secs_f64();
    stop.cancel();
    for task in tasks {
        let _ = tokio::time::timeout(Duration::from_secs(5), task).await;
    }
    Ok(rate)
}

async fn sdk_worker(url: String, stop: CancellationToken) -> Result<()> {
    faena::Worker::new()
        .url(url)
        .concurrency(CONCURRENCY)
        .handle(JOB_TYPE, async |_: faena::Context, _: serde_json::Value| Ok::<_, faena::JobError>(()))
        .run_until(stop.cancelled_owned())
        .await
        .context("a worker ended")
}

async fn grpc_worker(url: String, stop: CancellationToken) -> Result<()> {
    let channel = tonic::transport::Endpoint::from_shared(url)?.connect().await?;
    let (sender, receiver) = mpsc::channel::<ConnectRequest>(2_048);
    let request = |message| ConnectRequest { message: Some(message) };
    let register =
        Register { capabilities: vec![JOB_TYPE.into()], concurrency: Some(CONCURRENCY), ..Register::default() };
    sender.send(request(Outgoing::Register(register))).await?;
    let outgoing = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let message = receiver.recv().await?;
        Some((message, receiver))
    });
    let mut incoming = WorkerServiceClient::new(channel).connect(outgoing).await?.into_inner();
    loop {
        let message =
            tokio::select! { () = stop.cancelled() => return Ok(()), message = incoming.message() => message? };
        match message.and_then(|message| message.message) {
            Some(Incoming::Job(job)) => {
                let done = Complete { job_id: job.id, run: Some(job.run), result_json: None };
                sender.send(request(Outgoing::Complete(done))).await?;
            }
            Some(_) => {}
            None => anyhow::bail!("the stream ended"),
        }
    }
}

async fn single_slot_worker(url: String, stop: CancellationToken) -> Result<()> {
    let mut socket = connect(&format!("{}/api/v1/workers/connect", url.replace("http:", "ws:")), 1).await?;
    loop {
        let message = tokio::select! { () = stop.cancelled() => return Ok(()), message = socket.next() => message };
        let message = message.context("the connection ended")??;
        let Message::Text(text) = message else { continue };
        let frame: faena_wire::frames::ServerFrame = serde_json::from_str(&text)?;
        if let Some(job) = frame.job {
            let done = format!(r#"{{"type":"complete","jobId":"{}","run":{}}}"#, job.id, job.run);
            socket.send(Message::text(done)).await?;
        }
    }
}

/// Returns the server's memory per connected worker, in KiB.
async fn memory(url: &str) -> Result<f64> {
    let target = Target::faena(url).await?;
    let address = format!("ws://{}/api/v1/workers/connect", target.address);
    // The first workers make the server allocate memory that all workers share.
    let mut connections = Vec::new();
    for _ in 0..20 {
        connections.push(connect(&address, 10).await?);
    }
    let before = target.server.resident_mib();
    for _ in 0..CONNECTED {
        connections.push(connect(&address, 10).await?);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after = target.server.resident_mib();
    Ok((after - before) * 1_024.0 / CONNECTED as f64)
}

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

async fn connect(address: &str, concurrency: u32) -> Result<Socket> {
    let (mut socket, _) = tokio_tungstenite::connect_async(address).await?;
    let register = serde_json::json!({"type": "register", "capabilities": [JOB_TYPE], "concurrency": concurrency});
    socket.send(Message::text(register.to_string())).await?;
    let answer = socket.next().await.context("no answer")??;
    ensure!(answer.to_text()?.contains("registered"), "{answer}");
    Ok(socket)
}
