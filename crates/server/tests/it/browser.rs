//! Tests the dashboard in a real browser: what a person does with it, and its accessibility, on a large screen and on a
//! phone.

mod axe;
mod chrome;
mod live;
mod dead_letters;
mod queues;
mod schedules;
mod seed;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{faena::eventually, shell::Shell};
use chrome::{Chrome, ENTER, ESCAPE, TAB, with_chrome};

/// Accessibility rules whose result depends on the theme or the width.
const VISUAL_RULES: [&str; 3] = ["color-contrast", "link-in-text-block", "scrollable-region-focusable"];
/// Themes and widths in which every page is checked.
const LOOKS: [(&str, u32); 4] = [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)];

#[tokio::test(flavor = "multi_thread")]
async fn every_page_is_accessible_and_fits_in_both_themes_and_languages_on_a_phone_too() {
    let (shell, seed) = seed::seeded().await;
    with_chrome(&shell.faena.url, async |chrome| {
        axe::install(chrome).await;
        for page in &seed.pages {
            chrome.set_theme("light").await;
            chrome.set_width(1280).await;
            chrome.open(page).await;
            axe::assert_accessible(chrome, page, &[]).await;
            for (theme, width) in LOOKS {
                chrome.set_theme(theme).await;
                chrome.set_width(width).await;
                let variant = format!("en.{theme}.{width}");
                chrome.assert_fits(&format!("{page} {variant}")).await;
                axe::assert_accessible(chrome, &format!("{page} {variant}"), &VISUAL_RULES).await;
                chrome.picture(page, &variant).await;
            }
            chrome.assert_no_errors(page).await;
        }
        chrome.set_language("es").await;
        for page in &seed.pages {
            chrome.open(page).await;
            assert_eq!(chrome.js("return document.documentElement.lang").await, "es", "{page}");
            axe::assert_accessible(chrome, &format!("{page} in Spanish"), &[]).await;
            for (theme, width) in LOOKS {
                chrome.set_theme(theme).await;
                chrome.set_width(width).await;
                let variant = format!("es.{theme}.{width}");
                chrome.assert_fits(&format!("{page} {variant}")).await;
                axe::assert_accessible(chrome, &format!("{page} {variant}"), &VISUAL_RULES).await;
                chrome.picture(page, &variant).await;
            }
            chrome.assert_no_errors(page).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_submits_finds_retries_and_watches_jobs() {
    let (shell, seed) = seed::seeded().await;
    with_chrome(&shell.faena.url, async |chrome| {
        submit_a_job(chrome).await;
        filter_and_retry(chrome).await;
        search_texts_and_sort(chrome).await;
        change_and_repeat_a_job(chrome, &shell).await;
        watch_a_list(chrome, &shell).await;
        pause_a_queue(chrome).await;
        approve_a_task(chrome, &shell, &seed.task).await;
        use_the_keyboard(chrome).await;
        choose_language_and_theme(chrome).await;
        chrome.assert_no_errors("the tour").await;
        read_without_script(chrome, &seed.pages).await;
    })
    .await;
}

async fn submit_a_job(chrome: &Chrome) {
    chrome.open("/").await;
    chrome.follow("a.btn[href='/jobs/new']").await;
    chrome.fill("input[name=name]", "report.build").await;
    chrome.fill("input[name=queue]", "reports").await;
    chrome.fill("textarea[name=payload]", "{\"month\": 7}").await;
    chrome.follow("form.stack button.primary").await;
    assert!(chrome.text(".notice").await.contains("The job was submitted."));
    assert_eq!(chrome.text("h1").await, "report.build");
    assert!(chrome.text("#payload").await.contains("\"month\": 7"));
    assert!(chrome.text(".why").await.starts_with("Why is it not running?"));
}

async fn filter_and_retry(chrome: &Chrome) {
    chrome.open("/jobs").await;
    chrome.fill("input[name=q]", "type:invoice.send state:failed").await;
    chrome.press(ENTER).await;
    chrome
        .until("location.search.includes('invoice.send') && document.querySelectorAll('tbody tr').length === 1")
        .await;
    assert!(chrome.text(".understood").await.contains("Type: invoice.send"));
    chrome.follow("a[href*='/jobs/bulk/retry']").await;
    assert_eq!(chrome.text("h1").await, "Retry: 1 job", "the question says how many");
    chrome.follow("button.primary").await;
    assert!(chrome.text(".notice").await.contains("1 job changed"));
}

async fn search_texts_and_sort(chrome: &Chrome) {
    for (text, found) in [("error:503", 1), ("payload:orderid", 3), ("payload:\"no such text\"", 0)] {
        chrome.open("/jobs").await;
        chrome.fill("input[name=q]", text).await;
        chrome.press(ENTER).await;
        chrome.until("location.search.includes('q=') && document.readyState === 'complete'").await;
        assert_eq!(chrome.js("return document.querySelectorAll('tbody tr').length").await, found, "{text}");
    }
    chrome.open("/jobs?queue=sync").await;
    let rows = "return [...document.querySelectorAll('tbody tr')].map((row) => row.dataset.key)";
    let newest = chrome.js(rows).await;
    chrome.follow(".sorts a[href*='order=asc']").await;
    let mut oldest = chrome.js(rows).await;
    assert_eq!(chrome.text(".sorts [aria-current]").await, "oldest");
    oldest.as_array_mut().unwrap().reverse();
    assert_eq!((oldest.as_array().unwrap().len(), &oldest), (4, &newest), "the filter stays");
    chrome.follow(".sorts a[href*='sort=priority']").await;
    let first = chrome.js("return document.querySelector('tbody tr').dataset.key").await;
    assert_eq!(first, newest[0], "the critical job was the last");
}

/// Edits a job that waits, runs it again with changes, and copies it, with the keyboard as well.
async fn change_and_repeat_a_job(chrome: &Chrome, shell: &Shell) {
    let body = json!({
        "name": "Print label 7", "type": "label.print", "queue": "print", "payload": {"copies": 1, "note": "it's"},
        "tags": ["paper"], "concurrencyKey": "printer-1", "retryOn": "transient", "maxRetries": 1,
    });
    let id = shell.faena.submit(body).await;
    chrome.open(&format!("/jobs/{id}")).await;
    chrome.js("window.isOldPage = true").await;
    chrome.press("e").await;
    chrome
        .until("!window.isOldPage && location.pathname.endsWith('/edit') && document.readyState === 'complete'")
        .await;
    chrome.fill("textarea[name=payload]", "{\"copies\": 2, \"note\": \"it's\"}").await;
    chrome.follow("form.stack button.primary").await;
    assert!(chrome.text(".notice").await.contains("saved"));
    assert!(chrome.text("#payload").await.contains("\"copies\": 2"));
    chrome.click("#curl-details summary").await;
    let command = chrome.text("#curl").await;
    assert!(command.starts_with(&format!("curl -X POST {}/api/v1/jobs ", shell.faena.url)), "{command}");
    let permissions = json!({"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]});
    chrome.command("Browser.grantPermissions", permissions).await;
    chrome.click("[data-copy=curl]").await;
    chrome.until("document.querySelector('[data-copy=curl]').textContent === 'Copied'").await;
    let copied = chrome.js_async("navigator.clipboard.readText().then(arguments[0])", json!([])).await;
    assert_eq!(copied, command.as_str());
    let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
    let created: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_is_copy(shell, created["id"].as_str().unwrap(), &id, "it's").await;
    chrome.js("window.isOldPage = true").await;
    chrome.press("a").await;
    chrome.until("!window.isOldPage && location.pathname === '/jobs/new' && document.readyState === 'complete'").await;
    chrome.fill("textarea[name=payload]", "{\"copies\": 3, \"note\": \"more\"}").await;
    chrome.follow("form.stack button.primary").await;
    assert_eq!(chrome.text("h1").await, "Print label 7");
    let page = chrome.js("return location.pathname").await;
    assert_is_copy(shell, page.as_str().unwrap().rsplit('/').next().unwrap(), &id, "more").await;
    chrome.press("?").await;
    assert!(chrome.text("#keys").await.contains("Edit"), "the page says which keys there are");
}

/// Checks that a job is another one with the same options, except for the note in its payload.
async fn assert_is_copy(shell: &Shell, id: &str, original: &str, note: &str) {
    assert_ne!(id, original, "it is another job");
    let (_, copy) = shell.faena.get(&format!("/api/v1/jobs/{id}")).await;
    let (_, original) = shell.faena.get(&format!("/api/v1/jobs/{original}")).await;
    for name in ["name", "type", "queue", "tags", "concurrencyKey", "retryOn", "maxRetries", "timeoutMs"] {
        assert_eq!(copy[name], original[name], "{name}");
    }
    assert_eq!(copy["payload"]["note"], note);
}

/// Checks that a line announces new rows, that rows change in place, and that the page is not loaded again.
async fn watch_a_list(chrome: &Chrome, shell: &Shell) {
    let id = shell.faena.submit(json!({"name": "first.one", "queue": "live"})).await;
    chrome.open("/jobs?queue=live").await;
    chrome.js("window.isSamePage = true").await;
    chrome.until("document.documentElement.classList.contains('is-live')").await;
    for name in ["second.one", "third.one"] {
        shell.faena.submit(json!({"name": name, "queue": "live"})).await;
    }
    chrome
        .until("document.querySelector('.fresh') && document.querySelector('.fresh').textContent.trim() === '2 new'")
        .await;
    assert_eq!(chrome.js("return document.querySelectorAll('tbody tr').length").await, 1, "what is read does not move");
    shell.faena.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    chrome.until("document.querySelector('tbody tr .st').textContent === 'Cancelled'").await;
    chrome.click(".fresh button").await;
    chrome.until("document.querySelectorAll('tbody tr').length === 3 && !document.querySelector('.fresh')").await;
    assert_eq!(chrome.js("return window.isSamePage").await, true, "the page was not loaded again");
}

async fn pause_a_queue(chrome: &Chrome) {
    chrome.open("/queues").await;
    chrome.follow("tr[data-key=sync] a").await;
    assert_eq!(chrome.text("h1").await, "sync");
    chrome.follow("button[value=pause]").await;
    assert!(chrome.text(".notice").await.contains("sync: paused"));
    assert!(chrome.text("main .st").await.contains("paused"));
    chrome.open("/queues").await;
    assert!(chrome.text("tr[data-key=sync]").await.contains("paused"));
}

async fn approve_a_task(chrome: &Chrome, shell: &Shell, task: &str) {
    chrome.open("/approvals").await;
    chrome.follow("tbody tr a").await;
    assert!(chrome.text(".decision").await.contains("1. Wrap the upload in a retry.\n2. Test it."));
    let is_in_view = "const [box, state] = ['#drawing', '#drawing .active'].map((e) => document.querySelector(e).getBoundingClientRect());
         return state.width > 50 && state.left >= box.left && state.right <= box.right";
    chrome.set_width(360).await;
    chrome.open(chrome.js("return location.pathname").await.as_str().unwrap()).await;
    assert_eq!(chrome.js(is_in_view).await, true, "the drawing begins at the current state");
    chrome.set_width(1280).await;
    chrome.fill("input[name=comment]", "go on").await;
    chrome.follow("button[formaction$='/approve']").await;
    assert!(chrome.text(".notice").await.contains("Your approval was recorded."));
    let (_, task) = shell.faena.get(&format!("/api/v1/tasks/{task}")).await;
    assert!(task["state"].as_str().unwrap().starts_with("EJECUTANDO_CODIGO"), "{task}");
}

/// Checks that every control can be reached without a mouse, and that the focus is always visible.
async fn use_the_keyboard(chrome: &Chrome) {
    chrome.open("/jobs?queue=live").await;
    chrome.press(TAB).await;
    let focused = "document.activeElement";
    assert_eq!(chrome.js(&format!("return {focused}.textContent")).await, "Skip to the content");
    chrome.press(ENTER).await;
    chrome.until("location.hash === '#main'").await;
    chrome.press("/").await;
    assert_eq!(chrome.js(&format!("return {focused}.name")).await, "q");
    chrome.press(ESCAPE).await;
    chrome.press("jjx").await;
    assert_eq!(chrome.js("return [...document.querySelectorAll('tbody tr')].findIndex((row) => row.classList.contains('selected'))").await, 1);
    assert_eq!(chrome.js("return document.querySelectorAll('tbody input:checked').length").await, 1);
    // Only visible elements have a text. The stream has replaced the content of the page in the meantime.
    assert_eq!(chrome.text("[data-key-action=retry]").await.replace('\n', ""), "Retry selected (1)");
    chrome.press("k").await;
    chrome.press(ENTER).await;
    chrome.until("location.pathname.length > 20 && document.readyState === 'complete'").await;
    let unreachable = chrome
        .js("const all = [...document.querySelectorAll('a[href], button, input, select, textarea, summary')];
             return all.filter((e) => e.offsetParent && e.tabIndex < 0).map((e) => e.outerHTML.slice(0, 100));")
        .await;
    assert_eq!(unreachable, Value::Array(Vec::new()), "every control can be reached with Tab");
    let mut seen = 0;
    for _ in 0..30 {
        chrome.press(TAB).await;
        let outline = chrome.js(&format!("return getComputedStyle({focused}).outlineStyle")).await;
        assert_ne!(
            outline,
            "none",
            "the focus is visible: {}",
            chrome.js(&format!("return {focused}.outerHTML")).await
        );
        seen += 1;
    }
    assert_eq!(seen, 30);
}

async fn choose_language_and_theme(chrome: &Chrome) {
    chrome.open("/jobs").await;
    let background = "return getComputedStyle(document.body).backgroundColor";
    chrome.set_theme("light").await;
    let light = chrome.js(background).await;
    chrome.set_theme("dark").await;
    assert_ne!(chrome.js(background).await, light, "the theme of the system");
    chrome.follow("button[name=theme][value=light]").await;
    assert_eq!(chrome.js(background).await, light, "the switch decides");
    chrome.follow("button[name=language][value=es]").await;
    assert_eq!(chrome.text("h1").await, "Trabajos");
    chrome.follow("button[name=language][value=en]").await;
    assert_eq!(chrome.text("h1").await, "Jobs");
}

async fn read_without_script(chrome: &Chrome, pages: &[String]) {
    chrome.command("Emulation.setScriptExecutionDisabled", json!({"value": true})).await;
    for page in pages {
        chrome.open(page).await;
        assert_eq!(chrome.js("return document.querySelectorAll('h1').length").await, 1, "{page}");
        let empty =
            chrome.js("return [...document.querySelectorAll('time')].filter((e) => !e.textContent).length").await;
        assert_eq!(empty, 0, "{page}: every time is readable");
        let is_live = chrome.js("return document.documentElement.classList.contains('is-live')").await;
        assert_eq!(is_live, false, "{page}: no script runs");
    }
    chrome.open("/jobs/new").await;
    chrome.fill("input[name=name]", "without.script").await;
    chrome.follow("form.stack button.primary").await;
    assert_eq!(chrome.text("h1").await, "without.script", "forms work too");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dependencies_of_a_job_are_drawn_and_listed() {
    let shell = Shell::start(&[]).await;
    let root =
        shell.faena.submit(json!({"name": "extract", "queue": "etl", "scheduledAt": "2099-01-01T00:00:00Z"})).await;
    let script = "<script>window.hostile=1</script>";
    let long = format!("a name that is much too long for its box {script}");
    let hub = shell.faena.submit(json!({"name": long, "queue": "etl", "type": "load", "dependsOn": [root]})).await;
    let children: Vec<Value> =
        (0..200).map(|n| json!({"name": format!("report {n}"), "type": "report", "dependsOn": [hub]})).collect();
    let (status, answer) = shell.faena.post("/api/v1/jobs/batch", json!({"jobs": children})).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    with_chrome(&shell.faena.url, async |chrome| {
        axe::install(chrome).await;
        let page = format!("/jobs/{hub}");
        chrome.open(&page).await;
        assert_eq!(chrome.js("return document.querySelectorAll('.graph a').length").await, 60);
        assert_eq!(chrome.js("return document.querySelectorAll('.graph .edge').length").await, 59);
        assert_eq!(chrome.text(".graph-note").await, "Dependencies not shown: 142. Open a job to see those around it.");
        let current = "const [box, node] = ['#graph', '#graph .current'].map((e) => document.querySelector(e).getBoundingClientRect());
             return node.left >= box.left && node.right <= box.right && node.top >= box.top && node.bottom <= box.bottom";
        for (theme, width) in LOOKS {
            chrome.set_theme(theme).await;
            chrome.set_width(width).await;
            chrome.open(&page).await;
            chrome.assert_fits(&format!("{page} {theme} {width}")).await;
            assert_eq!(chrome.js(current).await, true, "the job itself is in view");
            axe::assert_accessible(chrome, &page, &[]).await;
            chrome.picture("/jobs/with-dependencies", &format!("en.{theme}.{width}")).await;
        }
        assert_eq!(chrome.js("return window.hostile === undefined").await, true);
        chrome.set_width(1280).await;
        chrome.click("#graph-list summary").await;
        let list = chrome.text("#graph-list").await;
        assert!(list.contains("extract") && list.contains("Depends on") && list.contains("Needed by"), "{list}");
        chrome.follow(&format!("#graph-list a[href='/jobs/{root}']")).await;
        assert_eq!(chrome.text("h1").await, "extract");
        assert_eq!(chrome.js("return document.querySelectorAll('.graph a').length").await, 60);
        assert_eq!(chrome.text(".graph .current .name").await, "extract");
        chrome.assert_no_errors(&page).await;
        chrome.command("Emulation.setScriptExecutionDisabled", json!({"value": true})).await;
        chrome.open(&page).await;
        chrome.click("#graph-list summary").await;
        assert!(chrome.text("#graph-list").await.contains("extract"), "the list works without script");
    })
    .await;
}

/// Names, queues, tags, errors, payloads, titles and plans that try to break out of the page or its layout.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_data_runs_nothing_and_breaks_no_layout() {
    let shell = Shell::start(&[]).await;
    let script = "<script>window.hostile=1</script><img src=x onerror='window.hostile=1'>\"'></textarea></pre>";
    let stacked = format!("e{}", "\u{301}".repeat(90));
    let mixed = "שלום\u{202e}gnp.exe مرحبا\u{2066}".to_owned();
    let names = [script.to_owned(), "W".repeat(100), stacked, mixed];
    let tags: Vec<String> = (0..32).map(|n| format!("{n}{}", "T".repeat(90))).collect();
    let mut pages: Vec<String> =
        ["/", "/jobs", "/queues", "/dead-letters", "/tasks", "/approvals", "/workers", "/schedules"]
            .map(str::to_owned)
            .into();
    for name in &names {
        // The largest body that the API accepts has 1 MiB.
        let size = if name == script { 1_000_000 } else { 1_000 };
        let payload = json!({name: name, "long": "z".repeat(size)});
        let body = json!({"name": name, "queue": name, "payload": payload, "tags": tags, "correlationId": name});
        let id = shell.faena.submit(body).await;
        let task = seed::task(&shell.faena, name, &format!("{name}\n{}", "P".repeat(5_000))).await;
        let schedule = json!({"name": name, "cronExpression": "0 2 * * *", "jobName": name, "queue": name});
        let (status, schedule) = shell.faena.post("/api/v1/schedules", schedule).await;
        assert_eq!(status, StatusCode::CREATED, "{schedule}");
        let body = json!({"name": name, "capabilities": [name], "queues": [name]});
        let (_, worker) = shell.faena.post("/api/v1/workers/register", body).await;
        let worker = worker["workerId"].as_str().unwrap();
        let (_, claimed) =
            shell.faena.post(&format!("/api/v1/workers/{worker}/claim"), json!({"max": 1, "waitMs": 5000})).await;
        let failure = json!({"run": claimed["jobs"][0]["run"], "error": format!("{name} {}", "E".repeat(3_000)), "retryable": false});
        let (status, answer) = shell.faena.post(&format!("/api/v1/workers/{worker}/jobs/{id}/fail"), failure).await;
        assert!(status.is_success(), "{answer}");
        pages.extend([
            format!("/jobs/{id}"),
            format!("/jobs/new?from={id}"),
            format!("/tasks/{task}"),
            format!("/workers/{worker}"),
            format!("/schedules/{}", schedule["id"].as_str().unwrap()),
        ]);
    }
    eventually("the jobs have failed", async || {
        let (_, list) = shell.faena.get("/api/v1/jobs?status=FAILED").await;
        (list["total"] == names.len()).then_some(())
    })
    .await;
    with_chrome(&shell.faena.url, async |chrome| {
        for page in &pages {
            chrome.open(page).await;
            for width in [1280, 360] {
                chrome.set_width(width).await;
                chrome.assert_fits(&format!("{page} at {width}")).await;
                assert_eq!(chrome.js("return window.hostile === undefined").await, true, "{page}");
                assert_eq!(
                    chrome.js("return document.querySelectorAll('main img[src=x], main script').length").await,
                    0,
                    "{page}"
                );
            }
            chrome.assert_no_errors(page).await;
        }
        submit_too_much(chrome).await;
    })
    .await;
}

/// Checks that more than the API accepts is rejected with a reason, and that the form keeps its input.
async fn submit_too_much(chrome: &Chrome) {
    chrome.open("/jobs/new").await;
    let tags: Vec<String> = (0..10_000).map(|n| format!("t{n}")).collect();
    let script = "const [tags] = arguments;
        const name = document.querySelector('input[name=name]');
        name.removeAttribute('maxlength');
        name.value = 'n'.repeat(300);
        document.querySelector('input[name=tags]').value = tags;";
    chrome.js_with(script, json!([tags.join(",")])).await;
    chrome.follow("form.stack button.primary").await;
    let notice = chrome.text(".notice.error").await;
    assert!(
        notice.contains("Name (type) of the job: must have 1 to 100 characters")
            && notice.contains("Tags, separated by commas: must have at most 32 entries"),
        "{notice}"
    );
    assert_eq!(chrome.js("return document.querySelector('input[name=name]').value.length").await, 300);
    chrome.assert_fits("a form with 10 000 tags").await;
    assert!(chrome.text("main").await.len() < 20_000, "the page shows the reason, not the data");
}
