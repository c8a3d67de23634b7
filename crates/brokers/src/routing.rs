//! Makes the routing key of a message from its type.

/// AMQP's limit for a routing key.
const MAX_BYTES: usize = 255;

/// `TicketFlow.Domain.Events.TicketStatusChangedEvent` becomes `ticket.status.changed`; `job.status.changed` stays as it is.
///
/// Of a type name the last segment counts (after `.`, or `+` for a nested type), without the suffix `Event`. Says why there is no key if there is none.
pub fn routing_key(kind: &str) -> Result<String, String> {
    if kind.is_empty() {
        return Err("the type is empty and makes no routing key".into());
    }
    if kind.len() > MAX_BYTES {
        return Err(format!(
            "the type is {} bytes long and makes no routing key: at most {MAX_BYTES} are possible",
            kind.len()
        ));
    }
    if let Some(bad) = kind.chars().find(|c| c.is_whitespace() || c.is_control() || matches!(c, '*' | '#' | '>')) {
        return Err(format!("the type {kind:?} makes no routing key: it contains {bad:?}"));
    }
    let key = if kind.chars().any(char::is_uppercase) { from_type_name(kind) } else { kind.to_owned() };
    if key.split('.').any(str::is_empty) {
        return Err(format!("the type {kind:?} makes no routing key: a word of it is empty"));
    }
    if key.len() > MAX_BYTES {
        return Err(format!(
            "the type {kind:?} makes a routing key of {} bytes: at most {MAX_BYTES} are possible",
            key.len()
        ));
    }
    Ok(key)
}

fn from_type_name(kind: &str) -> String {
    let name = kind.rsplit(['.', '+']).next().unwrap_or(kind);
    // `Event` alone is a name, not a suffix.
    let name = name.strip_suffix("Event").filter(|rest| !rest.is_empty()).unwrap_or(name);
    let letters: Vec<char> = name.chars().collect();
    let mut key = String::with_capacity(name.len() + 4);
    for (at, letter) in letters.iter().enumerate() {
        if at > 0 && starts_word(&letters, at) {
            key.push('.');
        }
        key.extend(letter.to_lowercase());
    }
    key
}

/// A capital begins a word, except inside an abbreviation: `SLABreached` is `sla.breached`.
fn starts_word(letters: &[char], at: usize) -> bool {
    if !letters[at].is_uppercase() {
        return false;
    }
    let after_small = !letters[at - 1].is_uppercase();
    let before_small = letters.get(at + 1).is_some_and(|next| next.is_lowercase());
    after_small || before_small
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]
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
    fn what_is_already_a_key_stays_as_it_is() {
        for kind in ["job.status.changed", "job.dead_lettered", "job", "a-b.c:d"] {
            assert_eq!(routing_key(kind).as_deref(), Ok(kind));
        }
    }

    #[test]
    fn what_makes_no_key_is_refused_with_the_reason() {
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
            routing_key("job created").unwrap_err(),
            "the type \"job created\" makes no routing key: it contains ' '"
        );
    }
}
