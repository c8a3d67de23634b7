//! The list of workers, and the page of a worker.

use serde_json::json;

use super::Browser;
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn workers_show_their_version_and_how_many_slots_are_in_use() {
    let shell = Shell::start(&[]).await;
    let register = json!({"workerId": "w1", "name": "mailer", "version": "1.4.2<b>", "capabilities": ["mail"],
        "concurrency": 2});
    shell.faena.post("/api/v1/workers/register", register).await;
    let silent = json!({"workerId": "silent", "capabilities": ["other"], "concurrency": 3});
    shell.faena.post("/api/v1/workers/register", silent).await;
    shell.faena.submit(json!({"name": "mail"})).await;
    let (_, claimed) = shell.faena.post("/api/v1/workers/w1/claim", json!({"waitMs": 5_000})).await;
    assert_eq!(claimed["jobs"].as_array().unwrap().len(), 1, "{claimed}");
    let (_, shown) = shell.faena.get("/api/v1/workers/w1").await;
    assert_eq!((&shown["inFlight"], shown["jobs"].as_array().unwrap().len()), (&json!(1), 1), "{shown}");

    let (_, list) = shell.faena.get("/api/v1/workers").await;
    let slots: u64 = list["workers"].as_array().unwrap().iter().map(|w| w["concurrency"].as_u64().unwrap()).sum();

    let mut browser = Browser::new(&shell.faena);
    assert!(browser.text("/").await.contains(&format!("of {slots} slots")), "also those of the worker without a name");
    for (language, title) in [("en", "Version"), ("es", "Versión")] {
        browser.language = language;
        let list = browser.text("/workers").await;
        for part in [title, "1.4.2&#60;b&#62;", "1 / 2", "0 / 3", env!("CARGO_PKG_VERSION")] {
            assert!(list.contains(part), "{part}: {list}");
        }
        let page = browser.text("/workers/w1").await;
        for part in [&format!("<dt>{title}</dt><dd>1.4.2&#60;b&#62;</dd>"), "<dd>1 / 2</dd>"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let page = browser.text("/workers/silent").await;
        assert!(page.contains(&format!("<dt>{title}</dt><dd>–</dd>")), "{page}");
        assert!(page.contains("<h1>silent</h1>"), "without a name, the id is the title: {page}");
    }
}
