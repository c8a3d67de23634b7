//! Validates the fields of cron expressions and replaces names by numbers.
//!
//! The crate croner accepts `1,,2`, `MON` as a minute and `7L`, and then never matches or matches the wrong time. So
//! croner only receives expressions that were validated here.

use croner::parser::CronParser;

/// A field of cron expressions, and its allowed values.
struct Field {
    name: &'static str,
    min: u16,
    max: u16,
    names: &'static [&'static str],
    /// Value of the first name.
    first: u16,
    allowed: &'static str,
}

const fn numeric(name: &'static str, max: u16, allowed: &'static str) -> Field {
    Field { name, min: 0, max, names: &[], first: 0, allowed }
}

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];
const DAY_OF_MONTH: &str = "day of month";
const DAY_OF_WEEK: &str = "day of week";

const FIELDS: [Field; 6] = [
    numeric("second", 59, "0-59"),
    numeric("minute", 59, "0-59"),
    numeric("hour", 23, "0-23"),
    Field {
        name: DAY_OF_MONTH,
        min: 1,
        max: 31,
        names: &[],
        first: 0,
        allowed: "1-31, L (last day), 15W (nearest working day), LW (last working day)",
    },
    Field { name: "month", min: 1, max: 12, names: &MONTHS, first: 1, allowed: "1-12 or JAN-DEC" },
    Field {
        name: DAY_OF_WEEK,
        min: 0,
        max: 7,
        names: &WEEKDAYS,
        first: 0,
        allowed: "0-7 or SUN-SAT (0 and 7 are Sunday), 5L (last Friday), 1#2 (second Monday)",
    },
];

const NICKNAMES: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// Maximum length of an expression. Error messages quote it.
pub(super) const MAX_TEXT_BYTES: usize = 300;

/// Smallest unit of an expression.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// Five fields only.
    Minutes,
    /// Five fields, or six with the second first, or a name such as `@daily`.
    Seconds,
}

/// Validates an expression and replaces names by numbers. The error says what is wrong and at which position.
pub(super) fn normalise(text: &str, precision: Precision) -> Result<String, String> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(format!("must have at most {MAX_TEXT_BYTES} bytes"));
    }
    let name = text.trim();
    if precision == Precision::Seconds && name.starts_with('@') {
        let known = NICKNAMES.iter().find(|(nickname, _)| nickname.eq_ignore_ascii_case(name));
        return known.map_or_else(|| Err(unknown_name(text)), |(_, expression)| Ok((*expression).to_owned()));
    }
    let words = words(text);
    let fields = match (words.len(), precision) {
        (5, _) => &FIELDS[1..],
        (6, Precision::Seconds) => &FIELDS[..],
        _ => return Err(wrong_count(&words, precision)),
    };
    let mut normalised = Vec::with_capacity(words.len());
    for (number, (field, (_, word))) in fields.iter().zip(&words).enumerate() {
        normalised.push(field.normalise(word).map_err(|error| describe_error(fields, &words, number, error))?);
    }
    Ok(normalised.join(" "))
}

/// Adds the position to an error of croner: its field is the first that croner rejects when all other fields are `*`.
pub(super) fn locate_parser_error(text: &str, normalised: &str, message: String) -> String {
    let normalised: Vec<_> = normalised.split(' ').collect();
    let fields = &FIELDS[FIELDS.len() - normalised.len()..];
    let words = words(text);
    let is_rejected = |number: &usize| {
        let alone = normalised.iter().enumerate().map(|(other, field)| if other == *number { field } else { "*" });
        CronParser::new().parse(&alone.collect::<Vec<_>>().join(" ")).is_err()
    };
    match (0..normalised.len()).find(is_rejected) {
        Some(number) if words.len() == normalised.len() => {
            describe_error(fields, &words, number, CronFieldError { offset: 0, message })
        }
        _ => message,
    }
}

/// An error in a field, and the character at which it begins, counted from 0.
struct CronFieldError {
    offset: usize,
    message: String,
}

fn error<T>(offset: usize, message: impl Into<String>) -> Result<T, CronFieldError> {
    Err(CronFieldError { offset, message: message.into() })
}

impl Field {
    /// Validates a field and replaces names by numbers.
    fn normalise(&self, text: &str) -> Result<String, CronFieldError> {
        let mut items = Vec::new();
        let mut offset = 0;
        for item in text.split(',') {
            let normalised =
                self.item(item).map_err(|error| CronFieldError { offset: offset + error.offset, ..error })?;
            offset += item.chars().count() + 1;
            items.push(normalised);
        }
        // croner accepts `*` only alone.
        Ok(if items.iter().any(|item| item == "*") { "*".to_owned() } else { items.join(",") })
    }

    fn item(&self, item: &str) -> Result<String, CronFieldError> {
        let item = item.to_uppercase();
        let is_day = [DAY_OF_MONTH, DAY_OF_WEEK].contains(&self.name);
        match item.as_str() {
            "" => return error(0, "a value is missing next to the comma"),
            "*" => return Ok(item),
            "?" if is_day => return Ok("*".to_owned()),
            _ => {}
        }
        if let Some((base, step)) = item.split_once('/') {
            return self.stepped(base, step);
        }
        match self.name {
            DAY_OF_MONTH => self.special_day(&item),
            DAY_OF_WEEK => self.special_weekday(&item),
            _ => self.range(&item),
        }
    }

    fn stepped(&self, base: &str, step: &str) -> Result<String, CronFieldError> {
        let range = match base {
            "*" => base.to_owned(),
            _ if base.contains('-') => self.range(base)?,
            "" => return error(0, format!("the step \"/{step}\" has no range; write \"*/{step}\"")),
            _ => {
                let from = self.value(base, 0)?;
                let range = format!("\"{from}-{}/{step}\"", self.max);
                return error(0, format!("a step needs a range; write {range} instead of \"{base}/{step}\""));
            }
        };
        match step.parse::<u16>() {
            Ok(number) if (1..=self.max).contains(&number) => Ok(format!("{range}/{number}")),
            _ => error(base.chars().count() + 1, format!("the step {step:?} is not a number from 1 to {}", self.max)),
        }
    }

    fn special_day(&self, item: &str) -> Result<String, CronFieldError> {
        match item.strip_suffix('W') {
            _ if item == "L" || item == "LW" => Ok(item.to_owned()),
            Some(day) => Ok(format!("{}W", self.value(day, 0)?)),
            None => self.range(item),
        }
    }

    fn special_weekday(&self, item: &str) -> Result<String, CronFieldError> {
        if item == "L" {
            return error(0, "\"L\" needs a weekday; write \"5L\" for the last Friday");
        }
        // croner never matches weekday 7 together with `L` or `#`.
        if let Some(day) = item.strip_suffix("#L").or(item.strip_suffix('L')) {
            return Ok(format!("{}L", self.value(day, 0)? % 7));
        }
        let Some((day, nth)) = item.split_once('#') else { return self.range(item) };
        let day_number = self.value(day, 0)? % 7;
        match nth.parse::<u8>() {
            Ok(nth) if (1..=5).contains(&nth) => Ok(format!("{day_number}#{nth}")),
            _ => error(day.chars().count() + 1, format!("{nth:?} after # is not a number from 1 to 5")),
        }
    }

    fn range(&self, item: &str) -> Result<String, CronFieldError> {
        let Some((from, to)) = item.split_once('-') else { return Ok(self.value(item, 0)?.to_string()) };
        let first = self.value(from, 0)?;
        let mut last = self.value(to, from.chars().count() + 1)?;
        if self.name == DAY_OF_WEEK && last == 0 && first > 0 {
            last = 7;
        }
        if first > last {
            let ranges = format!("{first}-{},{}-{last}", self.max, self.min);
            return error(0, format!("the range {item:?} runs backwards; write {ranges:?}"));
        }
        Ok(format!("{first}-{last}"))
    }

    fn value(&self, text: &str, offset: usize) -> Result<u16, CronFieldError> {
        if let Some(nth) = self.names.iter().position(|name| *name == text) {
            return Ok(self.first + u16::try_from(nth).unwrap_or_default());
        }
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u16>() {
            Ok(value) if (self.min..=self.max).contains(&value) && digits => Ok(value),
            _ if digits => error(offset, format!("{text:?} is not between {} and {}", self.min, self.max)),
            _ if text.is_empty() => error(offset, "a number is missing"),
            _ => match self.names.first() {
                Some(name) => error(offset, format!("{text:?} is neither a number nor a name such as {name:?}")),
                None => error(offset, format!("{text:?} is not a number")),
            },
        }
    }
}

fn describe_error(fields: &[Field], words: &[(usize, &str)], number: usize, error: CronFieldError) -> String {
    let (field, (position, _)) = (&fields[number], words[number]);
    format!(
        "invalid {} field ({} of {}, position {}): {}; allowed: {}, *, lists (1,3), ranges (1-5) and steps (*/2); {}",
        field.name,
        number + 1,
        fields.len(),
        position + error.offset,
        error.message,
        field.allowed,
        read_as(fields, words),
    )
}

/// Returns the words of a text, each with its position in characters, counted from 1.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut rest = text;
    let mut position = 1;
    while let Some(start) = rest.find(|c: char| !c.is_whitespace()) {
        position += rest[..start].chars().count();
        rest = &rest[start..];
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        words.push((position, &rest[..end]));
        position += rest[..end].chars().count();
        rest = &rest[end..];
    }
    words
}

/// Says which word was read as which field, so that a shifted field is noticed.
fn read_as(fields: &[Field], words: &[(usize, &str)]) -> String {
    let parts = fields.iter().zip(words).map(|(field, (_, word))| match *word {
        "*" | "?" => format!("every {}", field.name),
        _ => format!("{} {word}", field.name),
    });
    format!("read as: {}", parts.collect::<Vec<_>>().join(", "))
}

fn wrong_count(words: &[(usize, &str)], precision: Precision) -> String {
    let count = match words.len() {
        0 => "is empty".to_owned(),
        1 => "has 1 field".to_owned(),
        n => format!("has {n} fields"),
    };
    let more = match (precision, words.len()) {
        (Precision::Minutes, _) => "",
        (Precision::Seconds, 7..) => ", or 6 with the second first; there is no year field",
        (Precision::Seconds, _) => ", or 6 with the second first",
    };
    let needed = "needs 5: minute, hour, day of month, month, day of week";
    match words.len() {
        1..=4 => format!("{count} but {needed}{more}; {}", read_as(&FIELDS[1..], words)),
        _ => format!("{count} but {needed}{more}"),
    }
}

fn unknown_name(text: &str) -> String {
    let position = words(text).first().map_or(1, |(position, _)| *position);
    let known: Vec<_> = NICKNAMES.iter().map(|(name, _)| *name).collect();
    let name = text.trim();
    let hint = match name.split_whitespace().next().unwrap_or_default().to_lowercase().as_str() {
        "@every" => "for a fixed interval use intervalMs instead of cronExpression",
        "@reboot" => "a schedule does not react to restarts; for a fixed interval use intervalMs",
        _ => "for a fixed interval use intervalMs",
    };
    format!("unknown name {name:?} (position {position}); known names: {}; {hint}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_field_is_reported_with_its_position_and_the_allowed_values() {
        assert_eq!(
            normalise("61 2 * * MON", Precision::Seconds).unwrap_err(),
            "invalid minute field (1 of 5, position 1): \"61\" is not between 0 and 59; allowed: 0-59, *, lists (1,3), ranges (1-5) and steps (*/2); read as: minute 61, hour 2, every day of month, every month, day of week MON"
        );
        assert_eq!(
            normalise("0 1,24 * * *", Precision::Seconds).unwrap_err(),
            "invalid hour field (2 of 5, position 5): \"24\" is not between 0 and 23; allowed: 0-23, *, lists (1,3), ranges (1-5) and steps (*/2); read as: minute 0, hour 1,24, every day of month, every month, every day of week"
        );
    }

    #[test]
    fn every_kind_of_error_in_a_field_is_named() {
        let cases = [
            (
                "5/5 * * * *",
                "minute field (1 of 5, position 1): a step needs a range; write \"5-59/5\" instead of \"5/5\"",
            ),
            ("/5 * * * *", "minute field (1 of 5, position 1): the step \"/5\" has no range; write \"*/5\""),
            ("*/0 * * * *", "minute field (1 of 5, position 3): the step \"0\" is not a number from 1 to 59"),
            ("*/x * * * *", "minute field (1 of 5, position 3): the step \"X\" is not a number from 1 to 59"),
            ("0 22-2 * * *", "hour field (2 of 5, position 3): the range \"22-2\" runs backwards; write \"22-23,0-2\""),
            ("0 0 * * 5-", "day of week field (5 of 5, position 11): a number is missing"),
            ("0 0 1,,2 * *", "day of month field (3 of 5, position 7): a value is missing next to the comma"),
            ("0 0 * FOO *", "month field (4 of 5, position 7): \"FOO\" is neither a number nor a name such as \"JAN\""),
            ("MON 0 * * *", "minute field (1 of 5, position 1): \"MON\" is not a number"),
            (
                "0 0 * * L",
                "day of week field (5 of 5, position 9): \"L\" needs a weekday; write \"5L\" for the last Friday",
            ),
            ("0 0 * * MON#6", "day of week field (5 of 5, position 13): \"6\" after # is not a number from 1 to 5"),
            ("0 0 * * 8", "day of week field (5 of 5, position 9): \"8\" is not between 0 and 7"),
            ("0 0 0 * *", "day of month field (3 of 5, position 5): \"0\" is not between 1 and 31"),
            ("0 0 L-3 * *", "day of month field (3 of 5, position 5): \"L\" is not a number"),
            ("ñ é 0 * * *", "second field (1 of 6, position 1): \"Ñ\" is not a number"),
            ("0 60 0 * * *", "minute field (2 of 6, position 3): \"60\" is not between 0 and 59"),
            (
                "0 0 * * +5",
                "day of week field (5 of 5, position 9): \"+5\" is neither a number nor a name such as \"SUN\"",
            ),
        ];
        for (cron, expected) in cases {
            let message = normalise(cron, Precision::Seconds).unwrap_err();
            assert_eq!(message.split("; allowed: ").next().unwrap(), format!("invalid {expected}"), "{cron}");
        }
    }

    #[test]
    fn a_wrong_number_of_fields_and_an_unknown_name_are_rejected() {
        let fields = "needs 5: minute, hour, day of month, month, day of week";
        let names = "known names: @yearly, @annually, @monthly, @weekly, @daily, @midnight, @hourly";
        let cases = [
            ("", format!("is empty but {fields}, or 6 with the second first")),
            (
                "5 4 *",
                format!(
                    "has 3 fields but {fields}, or 6 with the second first; read as: minute 5, hour 4, every day of month"
                ),
            ),
            (
                "0 0 0 1 1 * 2027",
                format!("has 7 fields but {fields}, or 6 with the second first; there is no year field"),
            ),
            (
                "@reboot",
                format!(
                    "unknown name \"@reboot\" (position 1); {names}; a schedule does not react to restarts; for a fixed interval use intervalMs"
                ),
            ),
            (
                " @every 5m",
                format!(
                    "unknown name \"@every 5m\" (position 2); {names}; for a fixed interval use intervalMs instead of cronExpression"
                ),
            ),
            ("@noon", format!("unknown name \"@noon\" (position 1); {names}; for a fixed interval use intervalMs")),
        ];
        for (cron, message) in cases {
            assert_eq!(normalise(cron, Precision::Seconds).unwrap_err(), message);
        }
        assert_eq!(normalise("0 0 0 * * *", Precision::Minutes).unwrap_err(), format!("has 6 fields but {fields}"));
    }
}
