//! Checks the links of every Markdown file: the file must exist, and the anchor must be a heading by GitHub's rules.
//!
//! Links to other sites are not followed: a test must not fail because a site is down.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

use crate::pages::REPOSITORY;

#[test]
fn every_link_leads_to_a_file_and_every_anchor_to_a_heading() {
    let root = Path::new(REPOSITORY).canonicalize().unwrap();
    let files = files_below(&root, "md");
    assert!(files.contains(&root.join("README.md")), "README.md is missing below {}", root.display());
    let mut problems = Vec::new();
    for file in &files {
        for (line, link) in links(&fs::read_to_string(file).unwrap()) {
            if let Err(problem) = check(&root, file, &link) {
                problems.push(format!("{}:{line}: {link}: {problem}", file.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert!(problems.is_empty(), "broken links:\n{}", problems.join("\n"));
}

/// Returns all files with this extension, sorted. Leaves out what is not part of the repository.
pub fn files_below(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            if ![".git", "target", "node_modules", "faena-data"].contains(&name.to_str().unwrap_or_default()) {
                found.extend(files_below(&path, extension));
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn check(root: &Path, file: &Path, link: &str) -> Result<(), String> {
    if ["http://", "https://", "mailto:"].iter().any(|scheme| link.starts_with(scheme)) {
        return Ok(());
    }
    if link.starts_with('/') || link.starts_with("file:") {
        return Err("absolute path; link relative to this file".into());
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() { file.to_owned() } else { file.with_file_name(path.replace("%20", " ")) };
    let target = target.canonicalize().map_err(|_| "no such file".to_owned())?;
    if !target.starts_with(root) {
        return Err("outside the repository".into());
    }
    match anchor {
        Some(anchor) if target.extension().is_some_and(|extension| extension == "md") => {
            let known = anchors(&fs::read_to_string(&target).unwrap());
            if known.contains(anchor) { Ok(()) } else { Err(format!("no such heading; there are {known:?}")) }
        }
        Some(_) => Err("an anchor needs a Markdown file".into()),
        None => Ok(()),
    }
}

/// Returns the lines outside code blocks with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fence = None::<String>;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let ticks: String = line.trim_start().chars().take_while(|&character| character == '`').collect();
        match &fence {
            Some(open) if ticks.len() >= open.len() => fence = None,
            Some(_) => {}
            None if ticks.len() >= 3 => fence = Some(ticks),
            None => return Some((index + 1, line.to_owned())),
        }
        None
    })
}

/// Returns the targets of all links and images with their line numbers.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let line = without_code_spans(&line);
        let definition = line.trim_start().starts_with('[').then(|| line.split_once("]: ")).flatten();
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(link, _)| link));
        let attributes = ["href=\"", "src=\""].into_iter().flat_map(|name| line.split(name).skip(1));
        let quoted = attributes.filter_map(|rest| rest.split_once('"').map(|(link, _)| link));
        for link in inline.chain(quoted).chain(definition.map(|(_, link)| link)) {
            // A title may follow the target.
            let target = link.split_whitespace().next().unwrap_or_default();
            found.push((number, target.trim_matches(['<', '>']).to_owned()));
        }
    }
    found
}

fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// Returns the anchors of all headings, and of the elements with an `id` or a `name`.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut seen = HashMap::<String, usize>::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() < line.len() && title.starts_with(' ') {
            let anchor = anchor(title);
            let count = seen.entry(anchor.clone()).or_default();
            found.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
            *count += 1;
        }
        for name in ["id=\"", "name=\""] {
            found.extend(line.split(name).skip(1).filter_map(|rest| rest.split_once('"').map(|(id, _)| id.to_owned())));
        }
    }
    found
}

/// Returns GitHub's anchor of a heading: lower case, without punctuation, with `-` for each space.
fn anchor(title: &str) -> String {
    let mut shown = String::new();
    let mut rest = title.trim();
    // A link in a heading counts with its text only.
    while let Some((before, after)) = rest.split_once("](") {
        shown.push_str(before);
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    shown.push_str(rest);
    let kept = shown.chars().filter(|&character| character.is_alphanumeric() || " -_".contains(character));
    kept.flat_map(char::to_lowercase).map(|character| if character == ' ' { '-' } else { character }).collect()
}

#[test]
fn anchors_follow_the_rules_of_github() {
    let page =
        "# One\n## `faena.toml`: the *file*\n## One\n```sh\n# no heading\n```\n### [Más](x.md) — y aquí\n#hashtag\n";
    let found: Vec<String> = anchors(page).into_iter().collect();
    assert_eq!(found, ["faenatoml-the-file", "más--y-aquí", "one", "one-1"]);
}

#[test]
fn links_are_found_outside_code_only() {
    let page =
        "[a](a.md) ![b](b.svg \"title\") `[no](no.md)`\n```\n[no](no.md)\n```\n[c]: <c.md>\n<img src=\"d.png\">\n";
    let found: Vec<(usize, String)> = links(page);
    let expected = [(1, "a.md"), (1, "b.svg"), (5, "c.md"), (6, "d.png")];
    assert_eq!(found, expected.map(|(line, link)| (line, link.to_owned())));
}
