//! Derives a message's routing key from its type.

use crate::Message;

/// AMQP's limit for a routing key.
const MAX_BYTES: usize = 255;

/// Reason why a type has no routing key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RoutingKeyError {
    #[error("type is empty and has no routing key")]
    Empty,
    #[error("type name has {bytes} bytes and no routing key; use at most {MAX_BYTES} bytes")]
    TypeTooLong { bytes: usize },
    #[error("type {kind:?} has no routing key: it contains {character:?}")]
    ForbiddenCharacter { kind: String, character: String },
    #[error("type {kind:?} has no routing key: one of its words is empty")]
    EmptyWord { kind: String },
    #[error("type {kind:?} has a routing key of {bytes} bytes; use at most {MAX_BYTES} bytes")]
    KeyTooLong { kind: String, bytes: usize },
}

/// Returns the routing key of a message.
pub(crate) fn message_key(message: &Message) -> Result<String, RoutingKeyError> {
    match &message.routing_key {
        Some(key) => check_characters(key, &message.kind).and_then(|()| checked(key.clone(), &message.kind)),
        None => routing_key(&message.kind),
    }
}

/// Returns the routing key for a message type.
///
/// `TicketFlow.Domain.Events.TicketStatusChangedEvent` becomes `ticket.status.changed`; `job.status.changed` stays the
/// same. Only the last segment of a type name is used (after `.`, or after `+` for a nested type), without the suffix
/// `Event`, without type arguments, and without the assembly of a .NET name.
fn routing_key(kind: &str) -> Result<String, RoutingKeyError> {
    if kind.is_empty() {
        return Err(RoutingKeyError::Empty);
    }
    let is_type_name = kind.contains(ASSEMBLY_SEPARATOR) || kind.chars().any(char::is_uppercase);
    let name = if is_type_name { type_name(kind) } else { kind.to_owned() };
    if name.len() > MAX_BYTES {
        return Err(RoutingKeyError::TypeTooLong { bytes: name.len() });
    }
    check_characters(&name, kind)?;
    let key = if name.chars().any(char::is_uppercase) { key_of_type_name(&name) } else { name };
    checked(key, kind)
}

fn check_characters(text: &str, kind: &str) -> Result<(), RoutingKeyError> {
    match text.chars().find(|c| c.is_whitespace() || c.is_control() || matches!(c, '*' | '#' | '>')) {
        None => Ok(()),
        Some(character) => {
            Err(RoutingKeyError::ForbiddenCharacter { kind: shorten(kind), character: character.to_string() })
        }
    }
}

/// Returns a key that every broker accepts, or why there is none.
fn checked(key: String, kind: &str) -> Result<String, RoutingKeyError> {
    if key.split('.').any(str::is_empty) {
        return Err(RoutingKeyError::EmptyWord { kind: shorten(kind) });
    }
    if key.len() > MAX_BYTES {
        return Err(RoutingKeyError::KeyTooLong { kind: shorten(kind), bytes: key.len() });
    }
    Ok(key)
}

/// What .NET writes between the parts of an assembly-qualified name: the type, the assembly, its version and so on.
const ASSEMBLY_SEPARATOR: &str = ", ";

/// Returns a type name without its assembly and its type arguments.
///
/// ``Shop.Changed`1[[Shop.Order, Shop, Version=1.0.0.0]], Shop, Version=1.0.0.0`` becomes `Shop.Changed`.
fn type_name(kind: &str) -> String {
    let (mut name, mut depth, mut in_arity) = (String::with_capacity(kind.len()), 0_usize, false);
    for character in kind.chars() {
        match character {
            '[' | '<' => depth += 1,
            ']' | '>' if depth > 0 => depth -= 1,
            _ if depth > 0 => {}
            ',' => break,
            '`' => in_arity = true,
            digit if in_arity && digit.is_ascii_digit() => {}
            other => {
                in_arity = false;
                name.push(other);
            }
        }
    }
    name
}

/// Returns the beginning of a type for an error message.
fn shorten(kind: &str) -> String {
    kind.chars().take(MAX_BYTES).collect()
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
    fn an_assembly_qualified_name_of_dotnet_becomes_the_key_of_its_type() {
        let assembly = "TicketFlow.Domain, Version=1.0.0.0, Culture=neutral, PublicKeyToken=null";
        for (name, key) in [
            ("TicketFlow.Domain.Events.TicketStatusChangedEvent", "ticket.status.changed"),
            ("TicketFlow.Domain.Tickets+StatusChangedEvent", "status.changed"),
            ("TicketFlow.Domain.Tickets+Audit+EntryAddedEvent", "entry.added"),
            (
                "TicketFlow.EntityChangedEvent`1[[TicketFlow.Ticket, TicketFlow.Domain, Version=1.0.0.0]]",
                "entity.changed",
            ),
            ("TicketFlow.Pair`2[[System.String, mscorlib],[TicketFlow.Ticket, TicketFlow.Domain]]", "pair"),
            ("TicketFlow.Outer`1+InnerEvent[[System.Int32, mscorlib]]", "inner"),
            ("TicketFlow.TicketCreatedEvent[]", "ticket.created"),
            ("EntityChangedEvent<Ticket>", "entity.changed"),
            ("tickets.created", "tickets.created"),
        ] {
            for kind in [format!("{name}, {assembly}"), format!("{name}, TicketFlow")] {
                assert_eq!(routing_key(&kind).as_deref(), Ok(key), "{kind}");
            }
        }
        let long = format!("A.ListChangedEvent`1[[{}]], {assembly}", "B.Ticket, ".repeat(100));
        assert_eq!(routing_key(&long).as_deref(), Ok("list.changed"), "only the name of the type has to be short");
    }

    #[test]
    fn a_malformed_type_name_is_an_error_and_never_a_panic() {
        for kind in [
            ", Assembly",
            "`1, A",
            "[[A, B]], C",
            "A.+, B",
            "A[[, B",
            "]], A",
            "A>B",
            "+",
            "Event`",
            "A`1`2, B",
            "<>, A",
        ] {
            let _ = routing_key(kind);
        }
        assert_eq!(routing_key(", Assembly"), Err(RoutingKeyError::EmptyWord { kind: ", Assembly".into() }));
    }

    #[test]
    fn a_type_that_is_already_a_routing_key_stays_the_same() {
        for kind in ["job.status.changed", "job.dead_lettered", "job", "a-b.c:d"] {
            assert_eq!(routing_key(kind).as_deref(), Ok(kind));
        }
    }

    #[test]
    fn a_given_key_is_used_unchanged_if_every_broker_accepts_it() {
        let message = |key: &str| Message {
            id: "1".into(),
            kind: "Order.Paid".into(),
            routing_key: Some(key.into()),
            key: "7".into(),
            sequence: 1,
            at: faena_domain::Timestamp::from_ms(0),
            correlation_id: None,
            traceparent: None,
            content_type: "application/json".into(),
            body: bytes::Bytes::new(),
        };
        assert_eq!(message_key(&message("Order.Paid")).as_deref(), Ok("Order.Paid"));
        for key in ["", "a..b", "a b", "a.*", &"x".repeat(256)] {
            assert!(message_key(&message(key)).is_err(), "{key:?}");
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
