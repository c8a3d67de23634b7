//! A real browser: headless Chromium, driven through chromedriver.
//!
//! The WebDriver protocol is a few JSON requests, so they are written here. The crate `thirtyfour` has them too, but it
//! enables the feature `preserve_order` of serde_json in the whole build, so the tests would not run the server that is
//! released.

use std::{
    env,
    io::{BufRead, BufReader},
    panic::{AssertUnwindSafe, resume_unwind},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::FutureExt;
use reqwest::{Client, Method};
use serde_json::{Value, json};

use crate::faena::{eventually, http};

/// Keys without a character, as WebDriver names them.
pub const TAB: &str = "\u{e004}";
pub const ENTER: &str = "\u{e006}";
pub const ESCAPE: &str = "\u{e00c}";

/// The name under which WebDriver returns the id of an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

const ARGUMENTS: [&str; 10] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-proxy-server",
];

/// chromedriver, killed at the end.
struct ChromeDriver {
    process: Child,
    port: u16,
}

impl ChromeDriver {
    fn start() -> ChromeDriver {
        let mut process = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver (Debian: chromium-driver) is installed");
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = lines.map_while(Result::ok).find_map(|line| {
            let (_, port) = line.split_once("started successfully on port ")?;
            port.trim_end_matches('.').parse().ok()
        });
        ChromeDriver { process, port: port.expect("chromedriver starts") }
    }
}

impl Drop for ChromeDriver {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A browser that shows the pages of one server.
pub struct Chrome {
    http: Client,
    /// Address of the session.
    session: String,
    /// Address of the server.
    url: String,
}

/// Starts a browser for a server, and closes it after the test, even if the test fails.
pub async fn with_chrome(url: &str, test: impl AsyncFnOnce(&Chrome)) {
    let _ = http();
    let http = Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().unwrap();
    let process = ChromeDriver::start();
    let driver = format!("http://127.0.0.1:{}/session", process.port);
    let options = json!({"binary": program("chromium"), "args": ARGUMENTS});
    let capabilities = json!({"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}});
    let created = send(&http, Method::POST, &driver, json!({"capabilities": capabilities})).await.unwrap();
    let session = format!("{driver}/{}", created["sessionId"].as_str().unwrap());
    let chrome = Chrome { http, session, url: url.to_owned() };
    chrome.post("/timeouts", json!({"pageLoad": 30_000, "script": 30_000})).await.unwrap();
    chrome.set_width(1280).await;
    let result = AssertUnwindSafe(test(&chrome)).catch_unwind().await;
    let _ = send(&chrome.http, Method::DELETE, &chrome.session, Value::Null).await;
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

/// Returns the path of a program.
fn program(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.exists());
    found.unwrap_or_else(|| panic!("{name} is installed"))
}

/// Sends a request of WebDriver. Returns its value, or the message of its error.
async fn send(http: &Client, method: Method, url: &str, body: Value) -> Result<Value, String> {
    let request = http.request(method, url);
    let request = if body.is_null() { request } else { request.json(&body) };
    let answer = request.send().await.map_err(|error| error.to_string())?;
    let status = answer.status();
    let mut answer: Value = answer.json().await.map_err(|error| error.to_string())?;
    let value = answer["value"].take();
    if status.is_success() { Ok(value) } else { Err(format!("{}: {}", value["error"], value["message"])) }
}

impl Chrome {
    async fn post(&self, path: &str, body: Value) -> Result<Value, String> {
        send(&self.http, Method::POST, &format!("{}{path}", self.session), body).await
    }

    pub async fn open(&self, path: &str) {
        let answer = self.post("/url", json!({"url": format!("{}{path}", self.url)})).await;
        answer.unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// Sends a command of the DevTools protocol. Returns its result.
    pub async fn command(&self, method: &str, parameters: Value) -> Value {
        self.post("/goog/cdp/execute", json!({"cmd": method, "params": parameters})).await.unwrap()
    }

    /// Saves a picture of the whole page in the folder FAENA_TEST_PICTURES, if that is set, for people to look at.
    pub async fn picture(&self, page: &str, variant: &str) {
        let Some(folder) = env::var_os("FAENA_TEST_PICTURES").map(PathBuf::from) else { return };
        let name: String = page.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(60).collect();
        let options = json!({"format": "png", "captureBeyondViewport": true});
        let picture = self.command("Page.captureScreenshot", options).await;
        let bytes = BASE64_STANDARD.decode(picture["data"].as_str().unwrap()).unwrap();
        std::fs::write(folder.join(format!("{name}.{variant}.png")), bytes).unwrap();
    }

    /// Sets the width of the screen in CSS pixels. It may be smaller than the minimum width of a window.
    pub async fn set_width(&self, width: u32) {
        let size = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false});
        self.command("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Sets what the system prefers: `light` or `dark`.
    pub async fn set_theme(&self, theme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": theme}]});
        self.command("Emulation.setEmulatedMedia", features).await;
    }

    pub async fn set_language(&self, code: &str) {
        self.post("/cookie", json!({"cookie": {"name": "faena_lang", "value": code}})).await.unwrap();
    }

    /// Evaluates a script that returns a value.
    pub async fn js(&self, script: &str) -> Value {
        self.js_with(script, json!([])).await
    }

    pub async fn js_with(&self, script: &str, arguments: Value) -> Value {
        let answer = self.post("/execute/sync", json!({"script": script, "args": arguments})).await;
        answer.unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Evaluates a script that passes its result to its last argument.
    pub async fn js_async(&self, script: &str, arguments: Value) -> Value {
        let answer = self.post("/execute/async", json!({"script": script, "args": arguments})).await;
        answer.unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits until a condition of JavaScript holds.
    pub async fn until(&self, condition: &str) {
        eventually(condition, async || {
            // The page may be navigating to the next one.
            let body = json!({"script": format!("return Boolean({condition})"), "args": []});
            let result = self.post("/execute/sync", body).await;
            (result == Ok(Value::Bool(true))).then_some(())
        })
        .await;
    }

    /// Returns the path of an element of the page.
    async fn element(&self, selector: &str) -> String {
        let found = self.post("/element", json!({"using": "css selector", "value": selector})).await;
        let found = found.unwrap_or_else(|error| panic!("{selector}: {error}"));
        format!("/element/{}", found[ELEMENT].as_str().unwrap())
    }

    /// Performs an action on an element. A page that updates itself may replace the element after it was found; then
    /// the new one is used.
    async fn on_element(&self, selector: &str, method: Method, action: &str) -> Value {
        eventually(selector, async || {
            let url = format!("{}{}/{action}", self.session, self.element(selector).await);
            let body = if method == Method::GET { Value::Null } else { json!({}) };
            match send(&self.http, method.clone(), &url, body).await {
                Err(error) if error.contains("stale element reference") => None,
                answer => Some(answer.unwrap_or_else(|error| panic!("{selector}: {error}"))),
            }
        })
        .await
    }

    /// Returns the text of an element as the page shows it.
    pub async fn text(&self, selector: &str) -> String {
        self.on_element(selector, Method::GET, "text").await.as_str().unwrap().to_owned()
    }

    pub async fn click(&self, selector: &str) {
        self.on_element(selector, Method::POST, "click").await;
    }

    /// Clicks a link or a button that leads to another page, and waits for that.
    pub async fn follow(&self, selector: &str) {
        self.js("window.isOldPage = true").await;
        self.click(selector).await;
        self.until("!window.isOldPage && document.readyState === 'complete'").await;
    }

    pub async fn fill(&self, selector: &str, text: &str) {
        let field = self.element(selector).await;
        self.post(&format!("{field}/clear"), json!({})).await.unwrap();
        self.post(&format!("{field}/value"), json!({"text": text})).await.unwrap();
    }

    /// Presses keys one after the other, wherever the focus is.
    pub async fn press(&self, keys: &str) {
        let strokes = keys.chars().flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key})));
        let strokes: Vec<Value> = strokes.collect();
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": strokes});
        self.post("/actions", json!({"actions": [keyboard]})).await.unwrap();
    }

    /// Fails if the page is wider than the screen, and names what is.
    pub async fn assert_fits(&self, page: &str) {
        let wide = self
            .js("const width = document.documentElement.clientWidth;
                 if (document.documentElement.scrollWidth <= width) return null;
                 const wide = [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > width + 1);
                 return wide.slice(0, 4).map((e) => e.outerHTML.slice(0, 200));")
            .await;
        assert_eq!(wide, Value::Null, "{page} is wider than the screen");
    }

    /// Fails if the browser reported an error: a script that failed, something that the policy forbids, a file that is missing.
    pub async fn assert_no_errors(&self, page: &str) {
        let log = self.post("/se/log", json!({"type": "browser"})).await.unwrap();
        let errors: Vec<&Value> = log.as_array().unwrap().iter().map(|entry| &entry["message"]).collect();
        assert!(errors.is_empty(), "{page}: {errors:?}");
    }
}
