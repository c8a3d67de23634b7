//! Shows a URL without its secrets.

/// Parameters whose values are shown. Every other one may be a password or a token.
const SHOWN_PARAMETERS: [&str; 17] = [
    "application_name",
    "channel_binding",
    "connect_timeout",
    "dbname",
    "host",
    "hostaddr",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "load_balance_hosts",
    "port",
    "sslmode",
    "sslnegotiation",
    "target_session_attrs",
    "tcp_user_timeout",
    "user",
];

const MASK: &str = "***";

/// Returns a URL to show: without its password, without the values of parameters that may be secret, and without its fragment.
///
/// A user name without a password is shown only in the URL of a database: elsewhere it may be a token. A text that cannot be read
/// with certainty is hidden entirely. Words around the URL, such as the name of an option, stay.
pub fn masked_url(text: &str) -> String {
    let (base, fragment) = split_at(text, '#');
    let (base, query) = split_at(base, '?');
    // A password may contain a question mark or a hash.
    let may_end_later = !base.contains('@') && text[base.len()..].contains('@');
    let Some(mut shown) = masked_base(base).filter(|_| !may_end_later) else { return MASK.into() };
    if let Some(query) = query {
        let parameters: Vec<String> = query.split('&').map(masked_parameter).collect();
        shown.push('?');
        shown.push_str(&parameters.join("&"));
    }
    if fragment.is_some() {
        shown.push('#');
        shown.push_str(MASK);
    }
    shown
}

/// Returns a command line to show: the words that contain a URL are masked.
pub fn masked_words<'a>(words: impl IntoIterator<Item = &'a String>) -> String {
    let shown = |word: &String| if word.contains("://") { masked_url(word) } else { word.clone() };
    words.into_iter().map(shown).collect::<Vec<_>>().join(" ")
}

fn split_at(text: &str, separator: char) -> (&str, Option<&str>) {
    text.split_once(separator).map_or((text, None), |(before, after)| (before, Some(after)))
}

/// Masks what is before the query. Returns `None` if it is not certain where a password would end.
fn masked_base(base: &str) -> Option<String> {
    let Some((scheme, rest)) = base.split_once("://") else {
        // `sqlite:FILE`, in contrast to settings such as `host=… password=…`.
        return base.starts_with("sqlite:").then(|| base.to_owned());
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if path.contains('@') {
        // The password may contain a slash.
        return None;
    }
    let Some((user, hosts)) = authority.rsplit_once('@') else { return Some(base.to_owned()) };
    let is_database = scheme.ends_with("postgres") || scheme.ends_with("postgresql");
    let user = match user.split_once(':') {
        Some((name, _)) => format!("{name}:{MASK}"),
        None if is_database => user.to_owned(),
        None => MASK.to_owned(),
    };
    Some(format!("{scheme}://{user}@{hosts}{path}"))
}

fn masked_parameter(parameter: &str) -> String {
    match parameter.split_once('=') {
        Some((name, value)) if SHOWN_PARAMETERS.contains(&name) => format!("{name}={value}"),
        Some((name, _)) => format!("{name}={MASK}"),
        None if parameter.is_empty() => String::new(),
        None => MASK.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked_in_every_part() {
        for (url, shown) in [
            ("postgres://u:s3cret@h:5432/db?sslmode=require", "postgres://u:***@h:5432/db?sslmode=require"),
            ("postgres://u:s3cret@h1:1,h2:2/db", "postgres://u:***@h1:1,h2:2/db"),
            ("postgres://u:s3c@ret@h/db", "postgres://u:***@h/db"),
            ("postgres://u@h/db?password=s3cret&user=u", "postgres://u@h/db?password=***&user=u"),
            ("postgresql://h/db?sslpassword=s3cret#s3cret", "postgresql://h/db?sslpassword=***#***"),
            ("https://s3cret@h/path?s3cret", "https://***@h/path?***"),
            ("https://h/path?a=1&PASSWORD=s3cret&token=s3cret", "https://h/path?a=***&PASSWORD=***&token=***"),
            ("https://h?p=s3cret/@x", "***"),
            ("postgres://u:s3?cret@h/db", "***"),
            ("postgres://u:s3#cret@h/db", "***"),
            ("--url=postgres://u:s3cret@h", "--url=postgres://u:***@h"),
            ("postgres://u:s3/cret@h/db", "***"),
            ("host=h password=s3cret", "***"),
            ("u:s3cret@h", "***"),
            ("", "***"),
            ("sqlite:faena-data/faena.db", "sqlite:faena-data/faena.db"),
            ("sqlite:/a b/c=d/faena.db", "sqlite:/a b/c=d/faena.db"),
            ("sqlite:faena.db?key=s3cret", "sqlite:faena.db?key=***"),
            ("https://example.org/v1", "https://example.org/v1"),
        ] {
            assert_eq!(masked_url(url), shown, "{url}");
        }
    }

    #[test]
    fn words_of_a_command_that_are_not_urls_stay() {
        let words = ["worker", "--db", "postgres://u:s3cret@h/db", "a=b"].map(str::to_owned);
        assert_eq!(masked_words(&words), "worker --db postgres://u:***@h/db a=b");
    }
}
