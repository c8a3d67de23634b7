//! The accessibility checks of axe-core.

use serde_json::{Value, json};

use super::chrome::Chrome;

/// Makes axe-core available on every page that is opened from now on.
pub async fn install(chrome: &Chrome) {
    let file = std::env::var("FAENA_TEST_AXE").expect("FAENA_TEST_AXE is the path of axe.min.js; ./test sets it");
    let source = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    chrome.command("Page.addScriptToEvaluateOnNewDocument", json!({"source": source})).await;
}

/// Fails if axe finds something serious or critical. `rules` names the rules to check; if it is empty, axe checks all
/// rules.
pub async fn assert_accessible(chrome: &Chrome, page: &str, rules: &[&str]) {
    let options = match rules {
        [] => json!({"resultTypes": ["violations"]}),
        rules => json!({"resultTypes": ["violations"], "runOnly": {"type": "rule", "values": rules}}),
    };
    let script = "const [options, done] = arguments;
        axe.run(document, options).then((result) => done(result.violations
            .filter((found) => found.impact === 'serious' || found.impact === 'critical')
            .map((found) => `${found.id}: ${found.nodes[0].html.slice(0, 200)} ${found.nodes[0].failureSummary}`)),
            (error) => done([String(error)]));";
    let found = chrome.js_async(script, json!([options])).await;
    assert_eq!(found, Value::Array(Vec::new()), "{page}");
}
