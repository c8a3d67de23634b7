//! Keeps functions, files and traits short enough to read in one go.
//!
//! The numbers come from services that are known to be readable. A function counts from its `fn` to its closing brace; tests count as
//! well, because they are read more often than anything else.

use std::{fs, path::Path};

use crate::{markdown::files_below, pages::REPOSITORY};

const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 90;
const FUNCTION_LINES_P90: usize = 30;
const TRAIT_METHODS: usize = 20;

/// A named piece of a source file and its size, in lines or in methods.
struct Measure {
    location: String,
    size: usize,
}

#[test]
fn functions_files_and_traits_keep_their_limits() {
    let root = Path::new(REPOSITORY).canonicalize().unwrap();
    let (mut files, mut functions, mut traits) = (Vec::new(), Vec::new(), Vec::new());
    for file in files_below(&root.join("crates"), "rs") {
        let path = file.strip_prefix(&root).unwrap().display().to_string();
        let source = fs::read_to_string(&file).unwrap();
        let code = code_only(&source);
        files.push(Measure { size: source.lines().count(), location: path.clone() });
        functions.extend(items(&code, "fn", &path, |body| body.lines().count()));
        traits.extend(items(&code, "trait", &path, methods));
    }
    let mut problems = exceeding(&files, FILE_LINES, "lines, a file may have");
    problems.extend(exceeding(&functions, FUNCTION_LINES, "lines, a function may have"));
    problems.extend(exceeding(&traits, TRAIT_METHODS, "methods, a trait may have"));
    functions.sort_by_key(|function| function.size);
    let p90 = functions[functions.len() * 9 / 10].size;
    if p90 > FUNCTION_LINES_P90 {
        problems.push(format!("nine of ten functions have up to {p90} lines; the limit is {FUNCTION_LINES_P90}"));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn exceeding(measures: &[Measure], limit: usize, what: &str) -> Vec<String> {
    let exceeding = measures.iter().filter(|measure| measure.size > limit);
    exceeding.map(|Measure { location, size }| format!("{location}: {size} {what} {limit}")).collect()
}

/// Finds the items that a keyword opens, and measures each from the keyword to its closing brace.
fn items(code: &str, keyword: &str, path: &str, measure: impl Fn(&str) -> usize) -> Vec<Measure> {
    let mut found = Vec::new();
    for (start, _) in code.match_indices(keyword) {
        let is_word = |character: char| character.is_alphanumeric() || character == '_';
        let rest = &code[start + keyword.len()..];
        let name: String = rest.trim_start().chars().take_while(|&character| is_word(character)).collect();
        if code[..start].ends_with(is_word) || !rest.starts_with(' ') || name.is_empty() {
            continue;
        }
        if let Some(length) = item_length(&code[start..]) {
            let line = code[..start].matches('\n').count() + 1;
            let size = measure(&code[start..start + length]);
            found.push(Measure { location: format!("{path}:{line} {name}"), size });
        }
    }
    found
}

/// Returns the length in bytes up to the closing brace, or `None` for a declaration without a body.
fn item_length(item: &str) -> Option<usize> {
    let (mut braces, mut brackets) = (0, 0);
    for (index, character) in item.char_indices() {
        match character {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            ';' if braces == 0 && brackets == 0 => return None,
            '{' => braces += 1,
            '}' => {
                braces -= 1;
                if braces <= 0 {
                    return Some(index + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// Counts the functions at the top level of a trait's body.
fn methods(body: &str) -> usize {
    let mut depth = 0;
    let mut top_level = String::new();
    for character in body.chars() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ if depth == 1 => top_level.push(character),
            _ => {}
        }
    }
    top_level.split_whitespace().filter(|&word| word == "fn").count()
}

/// Replaces comments and the contents of literals by spaces, so that only braces of the code remain. Keeps the lines.
fn code_only(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = literal_length(rest);
        if length == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        code.extend(rest[..length].chars().map(|character| if character == '\n' { '\n' } else { ' ' }));
        rest = &rest[length..];
    }
    code
}

/// Returns the length of the comment, string or character at the start of `rest`, or 0.
fn literal_length(rest: &str) -> usize {
    let until = |end: &str, start: usize| rest[start..].find(end).map_or(rest.len(), |found| start + found + end.len());
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return until("*/", 2);
    }
    if rest.starts_with("r\"") || rest.starts_with("r#") {
        let hashes = rest[1..].chars().take_while(|&character| character == '#').count();
        if rest[1 + hashes..].starts_with('"') {
            return until(&format!("\"{}", "#".repeat(hashes)), 2 + hashes);
        }
    }
    if rest.starts_with('"') {
        return quoted_length(rest, '"');
    }
    // A lifetime has no closing quote behind its first character.
    let is_character = rest.starts_with("'\\") || rest.chars().nth(2) == Some('\'');
    if rest.starts_with('\'') && is_character { quoted_length(rest, '\'') } else { 0 }
}

fn quoted_length(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (index, character) in rest.char_indices().skip(1) {
        if character == quote && !is_escaped {
            return index + 1;
        }
        is_escaped = character == '\\' && !is_escaped;
    }
    rest.len()
}

#[test]
fn braces_in_comments_and_literals_do_not_count() {
    let code =
        code_only("fn a<'a>() { // {\n  \"}\\\"}\"; r#\"}\"}\"#; '{'; '\\''; /* } */\n}\nfn b(x: [u8; 2]) -> u8;\n");
    let found = items(&code, "fn", "x.rs", |body| body.lines().count());
    let found: Vec<(&str, usize)> = found.iter().map(|item| (item.location.as_str(), item.size)).collect();
    assert_eq!(found, [("x.rs:1 a", 3)]);
}

#[test]
fn functions_inside_a_method_do_not_count_as_methods() {
    let code = code_only("trait T {\n  fn a();\n  async fn b() { fn inner() {} }\n}\n");
    let found = items(&code, "trait", "x.rs", methods);
    assert_eq!(found.iter().map(|item| item.size).collect::<Vec<_>>(), [2]);
}
