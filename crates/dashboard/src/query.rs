//! The query part of a page's address: filters live there, so that a list can be shared as a link.

use url::form_urlencoded;

/// Names and values in their order. A name may occur more than once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs(Vec<(String, String)>);

impl Pairs {
    pub fn parse(text: Option<&str>) -> Pairs {
        let pairs = form_urlencoded::parse(text.unwrap_or_default().as_bytes());
        Pairs(pairs.filter(|(_, value)| !value.is_empty()).map(|(name, value)| (name.into(), value.into())).collect())
    }

    /// Returns the first value of a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// Returns the pairs with `value` as the only value of `name`.
    pub fn with(&self, name: &str, value: &str) -> Pairs {
        let mut pairs = self.without(name);
        pairs.0.push((name.to_owned(), value.to_owned()));
        pairs
    }

    pub fn without(&self, name: &str) -> Pairs {
        Pairs(self.0.iter().filter(|(found, _)| found != name).cloned().collect())
    }

    /// Returns the pairs with these names, each with its first value.
    pub fn only(&self, names: &[&str]) -> Pairs {
        let pair = |name: &&str| Some(((*name).to_owned(), self.get(name)?.to_owned()));
        Pairs(names.iter().filter_map(pair).collect())
    }

    pub fn add(&mut self, name: &str, value: &str) {
        self.0.push((name.to_owned(), value.to_owned()));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the address of a page with this query.
    pub fn link(&self, path: &str) -> String {
        if self.0.is_empty() {
            return path.to_owned();
        }
        let mut text = form_urlencoded::Serializer::new(String::new());
        text.extend_pairs(&self.0);
        format!("{path}?{}", text.finish())
    }
}

/// Encodes a text as one segment of a path.
pub fn segment(text: &str) -> String {
    let encoded: String = form_urlencoded::byte_serialize(text.as_bytes()).collect();
    encoded.replace('+', "%20")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_survives_being_changed() {
        let pairs = Pairs::parse(Some("q=a%20b&status=FAILED&page=2&empty="));
        assert_eq!((pairs.get("q"), pairs.get("empty")), (Some("a b"), None));
        assert_eq!(pairs.without("page").with("status", "QUEUED").link("/jobs"), "/jobs?q=a+b&status=QUEUED");
        assert_eq!(Pairs::default().link("/jobs"), "/jobs");
    }

    #[test]
    fn a_segment_cannot_change_the_rest_of_the_path() {
        assert_eq!(segment("a/../b?c#d e"), "a%2F..%2Fb%3Fc%23d%20e");
    }
}
