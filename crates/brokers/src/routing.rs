//! Derives a message's routing key from its type.

/// AMQP's limit for a routing key.
const MAX_BYTES: usize = 255;

/// Reason why a type has no routing key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RoutingKeyError {
    #[error("type is empty and has no routing key")]
    Empty,
    #[error("type has {bytes} bytes and no routing key; use at most {MAX_BYTES} bytes")]
    TypeTooLong { bytes: usize },
    #[error("type {kind:?} has no routing key: it contains {character:?}")]
    ForbiddenCharacter { kind: String, character: String },
    #[error("type {kind:?} has no routing key: one of its words is empty")]
    EmptyWord { kind: String },
    #[error("type {kind:?} has a routing key of {bytes} bytes; use at most {MAX_BYTES} bytes")]
    KeyTooLong { kind: String, bytes: usize },
}

/// Returns the routing key for a message type.
///
/// `TicketFlow.Domain.Events.TicketStatusChangedEvent` becomes `ticket.status.changed`; `job.status.changed` stays the
/// same. Only the last segment of a type name is used (after `.`, or after `+` for a nested type), without the suffix
/// `Event`.
pub(crate) fn routing_key(kind: &str) -> Result<String, RoutingKeyError> {
    if kind.is_empty() {
        return Err(RoutingKeyError::Empty);
    }
    if kind.len() > MAX_BYTES {
        return Err(RoutingKeyError::TypeTooLong { bytes: kind.len() });
    }
    if let Some(character) = kind.chars().find(|c| c.is_whitespace() || c.is_control() || matches!(c, '*' | '#' | '>'))
    {
        return Err(RoutingKeyError::ForbiddenCharacter { kind: kind.to_owned(), character: character.to_string() });
    }
    let key = if kind.chars().any(char::is_uppercase) { key_of_type_name(kind) } else { kind.to_owned() };
    if key.split('.').any(str::is_empty) {
        return Err(RoutingKeyError::EmptyWord { kind: kind.to_owned() });
    }
    if key.len() > MAX_BYTES {
        return Err(RoutingKeyError::KeyTooLong { kind: kind.to_owned(), bytes: key.len() });
    }
    Ok(key)
}

fn key_of_type_name(kind: &str) -> String {
    let name = kind.rsplit(['.', '+']).next().unwrap_or(kind);
    // `Event` alone is a name, not a suffix.
    let name = name.strip_suffix("Event").filter(|rest| !rest.is_empty()).unwrap_or(name);
    let characters: Vec<char> = name.chars().collect();
    let mut key = String::with_capacity(name.len() + 4);
    for (index, character) in characters.iter().enumerate() {
        if index > 0 && starts_word(&characters, index) {
            key.push('.');
        }
        key.extend(character.to_lowercase());
    }
    key
}

/// Returns whether a word starts at `index`: at a capital letter, except inside an abbreviation.
///
/// `SLABreached` becomes `sla.breached`.
fn starts_word(characters: &[char], index: usize) -> bool {
    if !characters[index].is_uppercase() {
        return false;
    }
    let follows_lowercase = !characters[index - 1].is_uppercase();
    let precedes_lowercase = characters.get(index + 1).is_some_and(|next| next.is_lowercase());
    follows_lowercase || precedes_lowercase
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a failed test must point at its line")]
mod tests {
    use super::*;

    #[test]
    fn a_type_name_becomes_words_joined_by_dots() {
        for (kind, key) in [
            ("TicketFlow.Domain.Events.TicketStatusChangedEvent", "ticket.status.changed"),
            ("TicketCreatedEvent", "ticket.created"),
            ("TicketCreated", "ticket.created"),
            ("Outer+TicketAssignedEvent", "ticket.assigned"),
            ("Event", "event"),
            ("EventLoggedEvent", "event.logged"),
            ("SLABreachedEvent", "sla.breached"),
            ("TicketSLABreached", "ticket.sla.breached"),
            ("Order2ShippedEvent", "order2.shipped"),
            ("shop.OrderPaid", "order.paid"),
            ("Ünïcode.ÄnderungEvent", "änderung"),
        ] {
            assert_eq!(routing_key(kind).as_deref(), Ok(key), "{kind}");
        }
    }

    #[test]
    fn a_type_that_is_already_a_routing_key_stays_the_same() {
        for kind in ["job.status.changed", "job.dead_lettered", "job", "a-b.c:d"] {
            assert_eq!(routing_key(kind).as_deref(), Ok(kind));
        }
    }

    #[test]
    fn a_type_without_a_routing_key_is_an_error_that_names_the_reason() {
        let long = "x".repeat(256);
        let longer_as_key = "A".to_owned() + &"aB".repeat(100);
        for kind in [
            "",
            " ",
            "job created",
            "job\ncreated",
            "job\u{0}",
            "job.*",
            "#",
            "orders.>",
            "..",
            "Tickets.",
            "job.",
            &long,
            &longer_as_key,
        ] {
            assert!(routing_key(kind).is_err(), "{kind:?} gave {:?}", routing_key(kind));
        }
        assert_eq!(
            routing_key("job created").unwrap_err().to_string(),
            "type \"job created\" has no routing key: it contains \" \""
        );
    }
}
