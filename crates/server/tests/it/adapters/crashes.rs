//! `kill -9` of adapters and of the server: every task ends, and nothing happens twice.

use serde_json::json;

use super::{Workshop, agent, text, wait_until_gone};
use crate::{
    faena::{Faena, eventually},
    proxy::Proxy,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_smith_continues_and_leaves_no_command_behind() {
    let mut workshop = Workshop::start().await;
    // The first run leaves half a change and never ends; the second one writes the change.
    workshop.script(
        "code.sh",
        "echo $$ >>\"$HOME/codes\"\n[ -e \"$HOME/again\" ] || { echo half >half; : >\"$HOME/again\"; exec sleep 600; }\n\
         echo hello >greeting\n",
    );
    workshop.script("test.sh", &format!("{}\ntest ! -e half\n", agent::TEST));
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let id = workshop.create("coding-task", false).await;
    eventually("the first run is in the middle", async || workshop.path("again").exists().then_some(())).await;
    let process = workshop.wait_for_lines("codes", 1).await.remove(0);
    workshop.smith.as_mut().unwrap().kill();
    wait_until_gone(&process).await;
    workshop.start_smith("plan.sh", "code.sh", &[]);
    let task = workshop.wait_for(&id, "COMPLETADA").await;
    assert_eq!(task["counters"], json!({}), "the tests passed in the first round");
    assert_eq!(workshop.lines("codes").len(), 2);
    let branch = format!("main..faena/{id}");
    assert_eq!(workshop.git(&["-C", "git/origin.git", "rev-list", "--count", &branch]), "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_sandbox_tests_again() {
    let mut workshop = Workshop::start().await;
    workshop.script("code.sh", "echo hello >greeting\n");
    let marks = workshop.path("marks").display().to_string();
    let test = format!("echo $$ >>{marks}\n[ $(wc -l <{marks}) -gt 1 ] || exec sleep 600\n{}", agent::TEST);
    workshop.script("test.sh", &test);
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &["--network", "on"]);
    let id = workshop.create("coding-task", false).await;
    let process = workshop.wait_for_lines("marks", 1).await.remove(0);
    workshop.sandbox.as_mut().unwrap().kill();
    wait_until_gone(&process).await;
    workshop.start_sandbox("test.sh", &["--network", "on"]);
    workshop.wait_for(&id, "COMPLETADA").await;
    let results = workshop.transitions(&id).await;
    assert_eq!(results.iter().filter(|event| *event == "resultado.integracion_finalizada").count(), 1);
}

/// Kills the server and both adapters in turn while many tasks run. Every task must end, with one result per round and no gap.
#[tokio::test(flavor = "multi_thread")]
async fn tasks_survive_kills_of_the_server_and_of_both_adapters() {
    const TASKS: usize = 12;
    let mut workshop = Workshop::start().await;
    // The adapters find a restarted server under the same address.
    let proxy = Proxy::start(&workshop.faena.url).await;
    workshop.url.clone_from(&proxy.url);
    let options = ["--concurrency", "3", "--reconcile", "2s"];
    workshop.start_smith("plan.sh", "code.sh", &options);
    workshop.start_sandbox("test.sh", &options);
    let mut ids = Vec::new();
    for _ in 0..TASKS {
        ids.push(workshop.create("coding-task", false).await);
    }
    for round in 1..=4 {
        // Each kill happens while tasks run: after this many results.
        workshop.wait_for_lines("codes", round * 4).await;
        match round % 3 {
            1 => {
                workshop.smith.as_mut().unwrap().kill();
                workshop.start_smith("plan.sh", "code.sh", &options);
            }
            2 => {
                workshop.sandbox.as_mut().unwrap().kill();
                workshop.start_sandbox("test.sh", &options);
            }
            _ => {
                workshop.faena.kill();
                workshop.faena = Faena::start(workshop.folder.path(), &[]).await;
                proxy.retarget(&workshop.faena.url);
                proxy.disconnect_all();
            }
        }
    }
    for id in &ids {
        let task = workshop.wait_for(id, "COMPLETADA").await;
        assert_eq!(task["counters"], json!({"correcciones": 1}), "{task:#}");
        let history = workshop.history(id).await;
        let numbers: Vec<u64> = history.iter().map(|record| record["sequence"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "the history of {id} has a gap");
        let applied =
            |event: &str| history.iter().filter(|record| record["event"] == event && !record["to"].is_null()).count();
        assert_eq!(
            [
                applied("resultado.plan_generado"),
                applied("resultado.pr_generada"),
                applied("resultado.integracion_finalizada")
            ],
            [1, 2, 2],
            "{id}"
        );
        let branch = format!("main..faena/{id}");
        assert_eq!(
            workshop.git(&["-C", "git/origin.git", "rev-list", "--count", &branch]),
            "2",
            "{}",
            text(&task, "id")
        );
    }
}
