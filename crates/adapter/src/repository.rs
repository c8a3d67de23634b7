//! Repositories that a task may name, and references to branches in them.
//!
//! A task comes from a person who may not run programs here, so nothing in it may reach git as an option, as a helper program, or
//! as a folder that the operator did not allow.

use std::{fmt, path::Path};

use url::Url;

/// URL schemes with which git runs no program of the caller's choice.
const SCHEMES: [&str; 5] = ["https", "http", "ssh", "git", "file"];
const MAX_BYTES: usize = 2_048;

/// The repositories that an operator allows.
#[derive(Clone, Debug)]
pub struct Allowed(Vec<String>);

/// A checked repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Repository {
    /// What git receives: an absolute path or a URL.
    pub address: String,
    /// The branch to start from, instead of the default branch.
    pub base: Option<String>,
}

/// A branch that contains a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest {
    pub address: String,
    pub branch: String,
}

impl fmt::Display for PullRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.address, self.branch)
    }
}

impl Allowed {
    /// Checks the prefixes that the operator gave.
    pub fn new(prefixes: &[String]) -> Result<Allowed, String> {
        let prefixes = prefixes.iter().map(|prefix| {
            let prefix = normalize(prefix).map_err(|reason| format!("--allow-repository \"{prefix}\": {reason}"))?;
            Ok(match prefix.starts_with('/') {
                true => resolve(&prefix),
                false => prefix,
            })
        });
        Ok(Allowed(prefixes.collect::<Result<_, String>>()?))
    }

    /// Checks the repository of a task: `ADDRESS` or `ADDRESS#BRANCH`.
    pub fn repository(&self, text: &str) -> Result<Repository, String> {
        let (address, base) = match text.split_once('#') {
            Some((address, branch)) => (address, Some(branch)),
            None => (text, None),
        };
        if let Some(branch) = base {
            check_branch(branch)?;
        }
        Ok(Repository { address: self.address(address)?, base: base.map(str::to_owned) })
    }

    /// Checks a reference to a change: `ADDRESS#BRANCH`.
    pub fn pull_request(&self, text: &str) -> Result<PullRequest, String> {
        let (address, branch) =
            text.rsplit_once('#').ok_or_else(|| format!("pull request \"{}\" is not ADDRESS#BRANCH", shorten(text)))?;
        check_branch(branch)?;
        Ok(PullRequest { address: self.address(address)?, branch: branch.to_owned() })
    }

    fn address(&self, text: &str) -> Result<String, String> {
        let refused = |reason: &str| format!("repository \"{}\" is refused: {reason}", shorten(text));
        let address = normalize(text).map_err(|reason| refused(&reason))?;
        // A link inside an allowed folder must not lead out of it.
        let compared = if address.starts_with('/') { resolve(&address) } else { address.clone() };
        match self.0.iter().any(|prefix| is_below(&compared, prefix)) {
            true => Ok(address),
            false => Err(refused("the operator has not allowed it with --allow-repository")),
        }
    }
}

/// Returns whether `address` is `prefix` or a path below it. `https://host/team` does not allow `https://host/team-b`.
fn is_below(address: &str, prefix: &str) -> bool {
    let prefix = prefix.trim_end_matches('/');
    let Some(rest) = address.strip_prefix(prefix) else { return false };
    rest.is_empty() || rest.starts_with('/') || (prefix.ends_with(':') && !prefix.contains("//"))
}

/// Validates an address, and returns it in the form in which addresses are compared.
fn normalize(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > MAX_BYTES {
        return Err(format!("it must have 1 to {MAX_BYTES} bytes"));
    }
    if text.starts_with('-') || text.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err("it must not begin with a hyphen or contain spaces".into());
    }
    if text.contains("::") {
        return Err("addresses with \"::\" run a program".into());
    }
    if text.split(['/', ':']).any(|part| part == ".." || part == ".") {
        return Err("it must not contain the parts . and ..".into());
    }
    if text.contains("://") {
        return normalize_url(text);
    }
    if text.starts_with('/') {
        return Ok(text.trim_end_matches('/').to_owned()).map(|path| if path.is_empty() { "/".into() } else { path });
    }
    match text.split_once(':') {
        // git@host:path
        Some((host, path)) if !host.contains('/') && !host.is_empty() && !path.starts_with('-') => {
            match host.rsplit('@').next().is_some_and(|host| !host.is_empty() && !host.starts_with('-')) {
                true => Ok(text.to_owned()),
                false => Err("the host name is not valid".into()),
            }
        }
        _ => Err("it must be an absolute path, a URL, or USER@HOST:PATH".into()),
    }
}

fn normalize_url(text: &str) -> Result<String, String> {
    let url = Url::parse(text).map_err(|error| format!("it is not a valid URL: {error}"))?;
    if !SCHEMES.contains(&url.scheme()) {
        return Err(format!("the scheme must be one of {}", SCHEMES.join(", ")));
    }
    if url.password().is_some() {
        return Err("it contains a password; use a git credential helper".into());
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("it must not have a query or a fragment".into());
    }
    if url.scheme() == "file" {
        // A file URL becomes a path, so that one prefix allows both forms.
        let path = url.to_file_path().map_err(|()| "it must name a local path".to_owned())?;
        return normalize(&path.display().to_string());
    }
    match url.host_str() {
        Some(host) if !host.starts_with('-') && !host.is_empty() => Ok(url.as_str().trim_end_matches('/').to_owned()),
        _ => Err("it must have a host".into()),
    }
}

/// Resolves symbolic links if the path exists.
fn resolve(path: &str) -> String {
    Path::new(path).canonicalize().map_or_else(|_| path.to_owned(), |path| path.display().to_string())
}

/// Accepts branch names that need no quoting anywhere.
fn check_branch(branch: &str) -> Result<(), String> {
    let is_valid = (1..=200).contains(&branch.len())
        && branch.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte))
        && branch.split('/').all(|part| {
            !part.is_empty() && !part.starts_with(['-', '.']) && !part.ends_with('.') && !part.ends_with(".lock")
        })
        && !branch.contains("..");
    match is_valid {
        true => Ok(()),
        false => Err(format!("branch \"{}\" is not valid", shorten(branch))),
    }
}

/// Returns the beginning of a text for a message.
fn shorten(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(prefixes: &[&str]) -> Allowed {
        Allowed::new(&prefixes.iter().map(|prefix| (*prefix).to_owned()).collect::<Vec<_>>()).expect("valid prefixes")
    }

    #[test]
    fn only_repositories_below_an_allowed_prefix_are_accepted() {
        let allowed = allowed(&["/srv/git", "https://host.example/team", "git@host.example:team/"]);
        for text in [
            "/srv/git/a.git",
            "/srv/git",
            "file:///srv/git/a.git",
            "https://host.example/team/a.git",
            "https://host.example/team",
            "git@host.example:team/a.git",
            "/srv/git/a.git#develop",
        ] {
            assert!(allowed.repository(text).is_ok(), "{text}: {:?}", allowed.repository(text));
        }
        for text in [
            "",
            "/srv/gitx/a.git",
            "/srv/git/../secret",
            "/etc",
            "file:///etc",
            "https://host.example/team-b/a.git",
            "https://host.example:444/team/a.git",
            "https://host.example.evil/team/a.git",
            "https://user:password@host.example/team/a.git",
            "https://host.example/team/a.git?x=1",
            "http://host.example/team/a.git",
            "--upload-pack=touch /tmp/x",
            "-u",
            "ext::sh -c id",
            "ext::id",
            "ssh://-oProxyCommand=id/team",
            "git@-host:team/a.git",
            "git@host.example:-team/a.git",
            "relative/path",
            "/srv/git/a b",
            "/srv/git/a\nb",
            "/srv/git/a.git#",
            "/srv/git/a.git#-x",
            "/srv/git/a.git#a..b",
            "/srv/git/a.git#a b",
        ] {
            assert!(allowed.repository(text).is_err(), "{text}");
        }
        assert!(allowed.repository(&"x".repeat(5_000)).is_err());
    }

    #[test]
    fn a_link_does_not_lead_out_of_an_allowed_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let (inside, outside) = (folder.path().join("in"), folder.path().join("out"));
        std::fs::create_dir(&inside).expect("a folder");
        std::fs::create_dir(&outside).expect("a folder");
        std::os::unix::fs::symlink(&outside, inside.join("link")).expect("a link");
        let allowed = allowed(&[&inside.display().to_string()]);
        assert!(allowed.repository(&inside.join("link").display().to_string()).is_err());
        assert!(allowed.repository(&inside.join("repo").display().to_string()).is_ok());
    }

    #[test]
    fn a_pull_request_is_an_allowed_address_and_a_branch() {
        let allowed = allowed(&["/srv/git"]);
        let pull_request = allowed.pull_request("/srv/git/a.git#faena/1").expect("a pull request");
        assert_eq!(pull_request.to_string(), "/srv/git/a.git#faena/1");
        for text in ["/srv/git/a.git", "/etc#x", "/srv/git/a.git#--help", "#x"] {
            assert!(allowed.pull_request(text).is_err(), "{text}");
        }
    }
}
