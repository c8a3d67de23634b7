//! What one caller may do.

use std::sync::Arc;

use faena_domain::{ApiKey, ApiKeyId, KeyScope};

/// Identity and permissions of one caller.
#[derive(Clone, Debug)]
pub struct Access {
    actor: Arc<str>,
    key: Option<ApiKeyId>,
    scopes: Arc<[KeyScope]>,
    /// `None`: all queues.
    queues: Option<Arc<[String]>>,
    /// Groups of the caller, which may decide on approvals of tasks.
    groups: Arc<[String]>,
    sees_payloads: bool,
    is_own_worker: bool,
}

/// Why a caller is rejected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AccessError {
    /// The caller is not authenticated: 401.
    Unauthorized(&'static str),
    /// The caller is authenticated but may not do this: 403.
    Forbidden(String),
}

impl Access {
    /// Returns full access, for callers that need no key.
    pub fn full(actor: &str) -> Access {
        Access::without_key(actor, KeyScope::Admin)
    }

    fn without_key(actor: &str, scope: KeyScope) -> Access {
        Access {
            actor: actor.into(),
            key: None,
            scopes: [scope].into(),
            queues: None,
            groups: [].into(),
            sees_payloads: true,
            is_own_worker: false,
        }
    }

    /// Returns the access of a person whom a reverse proxy has authenticated.
    pub fn of_person(name: &str, groups: Vec<String>) -> Access {
        Access { groups: groups.into(), ..Access::full(&format!("user {name}")) }
    }

    /// Returns the access of a worker process that this server has started.
    pub fn of_own_worker() -> Access {
        Access { is_own_worker: true, ..Access::without_key("pool", KeyScope::Worker) }
    }

    pub fn of_key(key: &ApiKey) -> Access {
        Access {
            actor: format!("key {} ({})", key.name, key.lookup).into(),
            key: Some(key.id),
            scopes: key.scopes.as_slice().into(),
            queues: key.queues.as_deref().map(Into::into),
            groups: key.groups.as_slice().into(),
            sees_payloads: !key.without_payloads,
            is_own_worker: false,
        }
    }

    /// Returns the name for the audit log.
    pub fn actor(&self) -> &str {
        &self.actor
    }

    pub fn key(&self) -> Option<ApiKeyId> {
        self.key
    }

    /// Returns what identifies the caller: the id of its key, which neither a rotation nor another key with the same name
    /// changes, or the name of a caller without a key.
    pub fn identity(&self) -> String {
        self.key.map_or_else(|| self.actor.to_string(), |id| format!("key:{id}"))
    }

    /// Returns the groups that the caller belongs to.
    pub fn groups(&self) -> &[String] {
        &self.groups
    }

    /// Returns whether the caller may see payloads, results, data, logs and errors of jobs and tasks.
    pub fn sees_payloads(&self) -> bool {
        self.sees_payloads
    }

    /// Returns whether the caller is a worker process that this server has started.
    pub fn is_own_worker(&self) -> bool {
        self.is_own_worker
    }

    /// Returns the queues that the caller is restricted to. `None`: all queues.
    pub fn queues(&self) -> Option<&[String]> {
        self.queues.as_deref()
    }

    pub fn includes_queue(&self, queue: &str) -> bool {
        self.queues.as_ref().is_none_or(|queues| queues.iter().any(|name| name == queue))
    }

    /// Checks that the caller has the scope that a route needs.
    pub fn require(&self, needed: KeyScope) -> Result<(), AccessError> {
        if self.scopes.iter().any(|scope| scope.includes(needed)) {
            Ok(())
        } else {
            Err(AccessError::Forbidden(format!("this API key needs the scope \"{needed}\"")))
        }
    }

    /// Checks that the caller has one of these scopes.
    pub fn require_any(&self, needed: &[KeyScope]) -> Result<(), AccessError> {
        if needed.iter().any(|scope| self.require(*scope).is_ok()) {
            return Ok(());
        }
        let names: Vec<String> = needed.iter().map(|scope| format!("\"{scope}\"")).collect();
        Err(AccessError::Forbidden(format!("this API key needs the scope {}", names.join(" or "))))
    }

    /// Checks that the caller may use a queue.
    pub fn require_queue(&self, queue: &str) -> Result<(), AccessError> {
        if self.includes_queue(queue) {
            Ok(())
        } else {
            Err(AccessError::Forbidden(format!("this API key is restricted to other queues than \"{queue}\"")))
        }
    }

    /// Checks that the caller is not restricted to some queues, for actions on the whole system.
    pub fn require_all_queues(&self) -> Result<(), AccessError> {
        match &self.queues {
            None => Ok(()),
            Some(_) => Err(AccessError::Forbidden("this API key is restricted to some queues".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::{ApiKeyText, NewApiKey, StoredApiKey, Timestamp};

    use super::*;

    fn key(scopes: &[KeyScope], queues: Option<&[&str]>) -> Access {
        let queues = queues.map(|names| names.iter().map(|name| (*name).into()).collect());
        let new = NewApiKey {
            name: "ci".into(),
            scopes: scopes.to_vec(),
            queues,
            groups: vec!["reviewers".into()],
            without_payloads: false,
            expires_at: None,
        };
        let text = ApiKeyText::from_random([1; 12], [2; 43]);
        Access::of_key(&StoredApiKey::new(new, &text, "ana", Timestamp::from_ms(0)).key)
    }

    #[test]
    fn a_missing_scope_is_named() {
        let read = key(&[KeyScope::Read], None);
        assert_eq!(read.require(KeyScope::Read), Ok(()));
        let error = read.require(KeyScope::Write);
        assert_eq!(error, Err(AccessError::Forbidden("this API key needs the scope \"write\"".into())));
        assert_eq!(read.actor(), "key ci (bbbbbbbbbbbb)");
        assert_eq!(read.require_any(&[KeyScope::Write, KeyScope::Read]), Ok(()));
        let error = read.require_any(&[KeyScope::Write, KeyScope::Worker]);
        let message = "this API key needs the scope \"write\" or \"worker\"";
        assert_eq!(error, Err(AccessError::Forbidden(message.into())));
    }

    #[test]
    fn keys_with_the_same_name_are_different_callers() {
        let (one, two) = (key(&[KeyScope::Write], None), key(&[KeyScope::Write], None));
        assert_eq!((one.actor(), one.groups()), (two.actor(), two.groups()));
        assert_ne!(one.identity(), two.identity());
        assert_eq!(
            (Access::full("loopback").identity().as_str(), Access::full("loopback").groups().len()),
            ("loopback", 0)
        );
    }

    #[test]
    fn a_restricted_key_can_use_only_its_queues() {
        let mail = key(&[KeyScope::Write], Some(&["mail"]));
        assert!(mail.require_queue("mail").is_ok() && mail.require_queue("Mail").is_err());
        assert!(mail.require_all_queues().is_err());
        let all = key(&[KeyScope::Write], None);
        assert!(all.require_queue("anything").is_ok() && all.require_all_queues().is_ok());
    }
}
