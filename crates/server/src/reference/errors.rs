//! Renders the reference of error codes from the table in the domain.

use std::fmt::Write;

use faena_domain::ErrorCode;

use super::{escape_cell, generated_notice};

pub fn render() -> String {
    let mut text = String::from("# Error codes\n\n");
    text.push_str(&generated_notice("errors"));
    text.push_str(
        "\nEvery error response has this body:\n\
         ```json\n\
         {\"error\": {\"code\": \"VALIDATION_ERROR\", \"message\": \"…\", \"details\": [{\"path\": \"priority\", \"message\": \"…\"}], \"requestId\": \"…\"}}\n\
         ```\n\
         `details` lists every invalid field. Find the request in the server's log by `requestId`.\n\n\
         | Code | HTTP status | Meaning |\n|---|---|---|\n",
    );
    for code in ErrorCode::ALL {
        let _ =
            writeln!(text, "| `{}` | {} | {} |", code.as_str(), code.http_status(), escape_cell(code.description()));
    }
    text
}
