//! The gateway with a real WebSocket client.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Error, Message, client::IntoClientRequest},
};

use super::{Adapter, Workshop, text};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn start(workshop: &Workshop, environment: &[(&str, &str)], arguments: &[&str]) -> (Adapter, String) {
    let arguments = [&["--progress", "500ms"], arguments].concat();
    start_at(workshop, &workshop.faena.url, environment, &arguments).await
}

/// Starts a gateway of the server at `server`. Returns it with its URL.
pub async fn start_at(
    workshop: &Workshop,
    server: &str,
    environment: &[(&str, &str)],
    arguments: &[&str],
) -> (Adapter, String) {
    let environment = [&[("FAENA_URL", server)], environment].concat();
    let arguments = [&["--listen", "127.0.0.1:0"], arguments].concat();
    let mut gateway = Adapter::start_with(workshop.folder.path(), &environment, "gateway", &arguments);
    let line = gateway.wait_for_log("gateway started").await;
    let url = line.split("url=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    gateway.wait_for_log("connected").await;
    (gateway, url)
}

async fn send(socket: &mut Socket, message: Value) {
    socket.send(Message::text(message.to_string())).await.unwrap();
}

/// Returns the next message that fits.
async fn next(socket: &mut Socket, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    let wait = async {
        loop {
            match socket.next().await {
                Some(Ok(Message::Text(text))) => {
                    let message: Value = serde_json::from_str(&text).unwrap();
                    if fits(&message) {
                        return message;
                    }
                }
                Some(Ok(_)) => {}
                other => panic!("waiting for {what}: {other:?}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), wait).await.unwrap_or_else(|_| panic!("no message: {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_creates_a_task_decides_on_its_plan_and_is_notified_of_its_end() {
    let mut workshop = Workshop::start().await;
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let (mut gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    let data = json!({"prompt": "add a greeting", "repositorioOrigen": workshop.repository()});
    send(&mut socket, json!({"tipo": "CREAR_TAREA", "ref": "r1", "payload": data})).await;
    let created = next(&mut socket, "the answer", |message| message["ref"] == "r1").await;
    assert_eq!(created["tipo"], "ACTUALIZACION_PROGRESO", "{created}");
    let id = text(&created, "taskId");

    let is_plan = |message: &Value| message["payload"]["plan"].is_string();
    let waiting = next(&mut socket, "a plan", is_plan).await;
    let first = text(&waiting["payload"], "planId");
    let decide = |plan: &str, approve: bool| {
        let payload = json!({"taskId": id, "planId": plan, "aprobado": approve, "comentario": "shorter"});
        json!({"tipo": "APROBAR_PLAN", "ref": "r2", "payload": payload})
    };
    send(&mut socket, decide("another", true)).await;
    let refused = next(&mut socket, "an error", |message| message["tipo"] == "ERROR").await;
    assert!(text(&refused["payload"], "mensaje").contains("is not the plan of the task"), "{refused}");
    send(&mut socket, decide(&first, false)).await;
    let is_other = |message: &Value| is_plan(message) && message["payload"]["planId"] != *first;
    let second = text(&next(&mut socket, "another plan", is_other).await["payload"], "planId");
    send(&mut socket, decide(&second, true)).await;

    // A second page follows the same task.
    let (mut other, _) = connect_async(&url).await.unwrap();
    send(&mut other, json!({"tipo": "SEGUIR_TAREA", "payload": {"taskId": id}})).await;
    for socket in [&mut socket, &mut other] {
        let ended = next(socket, "the end", |message| message["tipo"] == "TAREA_FINALIZADA").await;
        assert_eq!((&ended["taskId"], &ended["payload"]["estado"]), (&json!(id), &json!("COMPLETADA")), "{ended}");
        assert_eq!(ended["payload"]["exito"], true);
    }
    assert_eq!(gateway.stop().await, 0);
}

/// Waits until the peer has disconnected.
async fn wait_for_end(socket: &mut Socket) {
    let ended = async { while let Some(Ok(_)) = socket.next().await {} };
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("the connection ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_continues_with_its_task_after_each_kill_of_the_gateway() {
    let mut workshop = Workshop::start().await;
    workshop.script(
        "code.sh",
        "echo run >>\"$HOME/codes\"\nuntil [ -e \"$HOME/go\" ]; do sleep 0.1; done\necho hello >greeting\n",
    );
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let (mut gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    let data = json!({"prompt": "add a greeting", "repositorioOrigen": workshop.repository()});
    send(&mut socket, json!({"tipo": "CREAR_TAREA", "payload": data})).await;
    let id = text(&next(&mut socket, "the answer", |message| message["taskId"].is_string()).await, "taskId");
    let follow = json!({"tipo": "SEGUIR_TAREA", "ref": "again", "payload": {"taskId": id}});
    let is_answer = |message: &Value| message["ref"] == "again";

    // Killed while the task waits for its plan.
    gateway.kill();
    wait_for_end(&mut socket).await;
    let plan = workshop.wait_for_plan(&id, "").await;
    let (mut gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    send(&mut socket, follow.clone()).await;
    let waiting = next(&mut socket, "the plan", is_answer).await;
    assert_eq!(waiting["payload"]["planId"], *plan, "{waiting}");

    // Killed while a decision is being sent: the page cannot know whether it was counted, reads the task, and decides again if not.
    let decide = json!({"tipo": "APROBAR_PLAN", "payload": {"taskId": id, "planId": plan, "aprobado": true}});
    send(&mut socket, decide.clone()).await;
    gateway.kill();
    wait_for_end(&mut socket).await;
    let (mut gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    send(&mut socket, follow.clone()).await;
    let found = next(&mut socket, "the state", is_answer).await;
    if found["payload"]["estado"] == "ESPERANDO_APROBACION_PLAN" {
        send(&mut socket, decide).await;
    }
    workshop.wait_for_lines("codes", 1).await;

    // Killed while the smith is at work. The task ends before another gateway runs.
    gateway.kill();
    wait_for_end(&mut socket).await;
    std::fs::write(workshop.path("go"), "").unwrap();
    workshop.wait_for(&id, "COMPLETADA").await;
    let (_gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    send(&mut socket, follow).await;
    let ended = next(&mut socket, "the end", is_answer).await;
    assert_eq!((&ended["tipo"], &ended["payload"]["exito"]), (&json!("TAREA_FINALIZADA"), &json!(true)), "{ended}");
    assert_eq!(ended["payload"]["estado"], "COMPLETADA");

    let (_, list) = workshop.faena.get("/api/v1/tasks").await;
    assert_eq!(list["total"], 1, "no second task");
    let transitions = workshop.transitions(&id).await;
    for event in ["approval.granted", "resultado.plan_generado", "resultado.pr_generada"] {
        assert_eq!(transitions.iter().filter(|found| *found == event).count(), 1, "{event}: {transitions:?}");
    }
    assert_eq!(workshop.lines("codes").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_sent_again_creates_no_second_task() {
    let workshop = Workshop::start().await;
    let (mut gateway, url) = start(&workshop, &[], &[]).await;
    let create = |prompt: &str| {
        let data = json!({"prompt": prompt, "repositorioOrigen": workshop.repository()});
        json!({"tipo": "CREAR_TAREA", "id": "6f1c", "ref": prompt, "payload": data})
    };
    let (mut socket, _) = connect_async(&url).await.unwrap();
    let mut tasks = Vec::new();
    for _ in 0..2 {
        send(&mut socket, create("greet")).await;
        tasks.push(text(&next(&mut socket, "the answer", |message| message["ref"] == "greet").await, "taskId"));
    }
    send(&mut socket, create("part")).await;
    let refused = next(&mut socket, "an error", |message| message["ref"] == "part").await;
    assert!(text(&refused["payload"], "mensaje").contains("used with another body"), "{refused}");
    gateway.kill();
    wait_for_end(&mut socket).await;
    let (_gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    send(&mut socket, create("greet")).await;
    tasks.push(text(&next(&mut socket, "the answer", |message| message["ref"] == "greet").await, "taskId"));
    assert!(tasks.iter().all(|task| *task == tasks[0]), "{tasks:?}");
    let (_, list) = workshop.faena.get("/api/v1/tasks").await;
    assert_eq!(list["total"], 1, "{list}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_messages_get_an_error_and_the_connection_stays_open() {
    let workshop = Workshop::start().await;
    let (_gateway, url) = start(&workshop, &[], &[]).await;
    let (mut socket, _) = connect_async(&url).await.unwrap();
    let unknown = "018f3c5e-7b1a-7000-8000-0000000000aa";
    for (message, part) in [
        ("nonsense".to_owned(), "not JSON"),
        (json!({"tipo": "BORRAR"}).to_string(), "tipo: must be"),
        (json!({"tipo": "CREAR_TAREA", "payload": {"prompt": "x"}}).to_string(), "payload.repositorioOrigen"),
        (json!({"tipo": "CREAR_TAREA", "payload": {"prompt": "", "repositorioOrigen": "/x"}}).to_string(), "prompt"),
        (json!({"tipo": "SEGUIR_TAREA", "payload": {"taskId": unknown}}).to_string(), "no task"),
        (json!({"tipo": "APROBAR_PLAN", "payload": {"taskId": unknown, "planId": "x"}}).to_string(), "no task"),
    ] {
        socket.send(Message::text(message.clone())).await.unwrap();
        let answer = next(&mut socket, "an error", |answer| answer["tipo"] == "ERROR").await;
        assert!(text(&answer["payload"], "mensaje").contains(part), "{message}: {answer}");
    }
    // A message beyond the limit ends the connection, and only this one.
    let _ = socket.send(Message::text("x".repeat(300 << 10))).await;
    let ended = tokio::time::timeout(Duration::from_secs(60), async { while let Some(Ok(_)) = socket.next().await {} });
    ended.await.unwrap();
    assert!(connect_async(&url).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_listed_origins_with_the_token_may_connect() {
    let workshop = Workshop::start().await;
    let arguments = ["--allow-origin", "https://front.example", "--max-connections", "2"];
    let (gateway, url) = start(&workshop, &[("FAENA_GATEWAY_TOKEN", "s3cret")], &arguments).await;
    let connect = async |headers: &[(&'static str, &str)]| {
        let mut request = url.as_str().into_client_request().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        match connect_async(request).await {
            Ok((socket, _)) => Ok(socket),
            Err(Error::Http(response)) => Err(response.status().as_u16()),
            Err(error) => panic!("{error}"),
        }
    };
    let bearer = ("authorization", "Bearer s3cret");
    assert_eq!(connect(&[]).await.err(), Some(401));
    assert_eq!(connect(&[("authorization", "Bearer wrong")]).await.err(), Some(401));
    assert_eq!(connect(&[bearer, ("origin", "https://evil.example")]).await.err(), Some(403));
    let first = connect(&[bearer, ("origin", "https://front.example")]).await;
    assert!(first.is_ok());
    let browser = connect(&[("sec-websocket-protocol", "bearer.s3cret")]).await;
    assert!(browser.is_ok());
    assert_eq!(connect(&[bearer]).await.err(), Some(503), "two connections are allowed");
    assert!(!gateway.log().contains("s3cret"));
}
