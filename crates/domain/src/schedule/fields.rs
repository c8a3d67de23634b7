//! The fields of cron expressions: reading them, and saying exactly what is wrong with them.
//!
//! croner takes `1,,2`, `MON` as a minute and `7L` without complaint, and then never fires or at another time. So it gets to see
//! only what was checked here, in plain numbers.

use croner::parser::CronParser;

/// One of the fields, and what may stand in it.
struct Kind {
    name: &'static str,
    least: u16,
    most: u16,
    names: &'static [&'static str],
    /// The number of the first name.
    first: u16,
    allowed: &'static str,
}

const fn numbers(name: &'static str, most: u16, allowed: &'static str) -> Kind {
    Kind { name, least: 0, most, names: &[], first: 0, allowed }
}

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];
const DAY_OF_MONTH: &str = "day of month";
const DAY_OF_WEEK: &str = "day of week";

const KINDS: [Kind; 6] = [
    numbers("second", 59, "0-59"),
    numbers("minute", 59, "0-59"),
    numbers("hour", 23, "0-23"),
    Kind {
        name: DAY_OF_MONTH,
        least: 1,
        most: 31,
        names: &[],
        first: 0,
        allowed: "1-31, L (last day), 15W (nearest working day), LW (last working day)",
    },
    Kind { name: "month", least: 1, most: 12, names: &MONTHS, first: 1, allowed: "1-12 or JAN-DEC" },
    Kind {
        name: DAY_OF_WEEK,
        least: 0,
        most: 7,
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

/// What was written comes back in the refusal, so it must not be long.
pub(super) const MAX_BYTES: usize = 300;

/// How fine an expression may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// Five fields only.
    Minutes,
    /// Five fields, or six with the second first, or a name like `@daily`.
    Seconds,
}

/// The fields of an expression in plain numbers, or what is wrong, and where, for people.
pub(super) fn plain(text: &str, precision: Precision) -> Result<String, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("is longer than {MAX_BYTES} characters"));
    }
    let name = text.trim();
    if precision == Precision::Seconds && name.starts_with('@') {
        let known = NICKNAMES.iter().find(|(nickname, _)| nickname.eq_ignore_ascii_case(name));
        return known.map_or_else(|| Err(unknown_name(text)), |(_, plain)| Ok((*plain).to_owned()));
    }
    let words = words(text);
    let kinds = match (words.len(), precision) {
        (5, _) => &KINDS[1..],
        (6, Precision::Seconds) => &KINDS[..],
        _ => return Err(wrong_count(&words, precision)),
    };
    let mut plain = Vec::with_capacity(words.len());
    for (number, (kind, (_, word))) in kinds.iter().zip(&words).enumerate() {
        plain.push(kind.read(word).map_err(|flaw| refusal(kinds, &words, number, flaw))?);
    }
    Ok(plain.join(" "))
}

/// For the case that croner refuses what was found good here: the field to blame is the one that it refuses when all others are `*`.
pub(super) fn blame(text: &str, plain: &str, what: String) -> String {
    let plain: Vec<_> = plain.split(' ').collect();
    let kinds = &KINDS[KINDS.len() - plain.len()..];
    let words = words(text);
    let refused = |number: &usize| {
        let alone = plain.iter().enumerate().map(|(other, field)| if other == *number { field } else { "*" });
        CronParser::new().parse(&alone.collect::<Vec<_>>().join(" ")).is_err()
    };
    match (0..plain.len()).find(refused) {
        Some(number) if words.len() == plain.len() => {
            refusal(kinds, &words, number, CronFieldError { offset: 0, what })
        }
        _ => what,
    }
}

/// What is wrong with a field, and at which of its characters, from 0.
struct CronFieldError {
    offset: usize,
    what: String,
}

fn flaw<T>(offset: usize, what: String) -> Result<T, CronFieldError> {
    Err(CronFieldError { offset, what })
}

impl Kind {
    /// The field in plain numbers.
    fn read(&self, field: &str) -> Result<String, CronFieldError> {
        let mut items = Vec::new();
        let mut offset = 0;
        for item in field.split(',') {
            let read = self.item(item).map_err(|flaw| CronFieldError { offset: offset + flaw.offset, ..flaw })?;
            offset += item.chars().count() + 1;
            items.push(read);
        }
        // croner takes `*` only alone.
        Ok(if items.iter().any(|item| item == "*") { "*".to_owned() } else { items.join(",") })
    }

    fn item(&self, item: &str) -> Result<String, CronFieldError> {
        let item = item.to_uppercase();
        let of_days = [DAY_OF_MONTH, DAY_OF_WEEK].contains(&self.name);
        match item.as_str() {
            "" => return flaw(0, "a value is missing next to the comma".to_owned()),
            "*" => return Ok(item),
            "?" if of_days => return Ok("*".to_owned()),
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
        let plain = match base {
            "*" => base.to_owned(),
            _ if base.contains('-') => self.range(base)?,
            "" => return flaw(0, format!("the step /{step} has nothing to step through: write */{step}")),
            _ => {
                let from = self.value(base, 0)?;
                let what = format!("a step needs a range: write {from}-{}/{step} instead of {base}/{step}", self.most);
                return flaw(0, what);
            }
        };
        match step.parse::<u16>() {
            Ok(number) if (1..=self.most).contains(&number) => Ok(format!("{plain}/{number}")),
            _ => flaw(base.chars().count() + 1, format!("the step {step:?} is not a number from 1 to {}", self.most)),
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
            return flaw(0, "L alone does not say which weekday: write 5L for the last Friday".to_owned());
        }
        // croner would never find a seventh weekday that is the last or the second one.
        if let Some(day) = item.strip_suffix("#L").or(item.strip_suffix('L')) {
            return Ok(format!("{}L", self.value(day, 0)? % 7));
        }
        let Some((day, nth)) = item.split_once('#') else { return self.range(item) };
        let day_number = self.value(day, 0)? % 7;
        match nth.parse::<u8>() {
            Ok(nth) if (1..=5).contains(&nth) => Ok(format!("{day_number}#{nth}")),
            _ => flaw(day.chars().count() + 1, format!("{nth:?} after # is not a number from 1 to 5")),
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
            let what = format!("the range {item} runs backwards: write {first}-{},{}-{last}", self.most, self.least);
            return flaw(0, what);
        }
        Ok(format!("{first}-{last}"))
    }

    fn value(&self, text: &str, offset: usize) -> Result<u16, CronFieldError> {
        if let Some(nth) = self.names.iter().position(|name| *name == text) {
            return Ok(self.first + u16::try_from(nth).unwrap_or_default());
        }
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u16>() {
            Ok(value) if (self.least..=self.most).contains(&value) && digits => Ok(value),
            _ if digits => flaw(offset, format!("{text} is not from {} to {}", self.least, self.most)),
            _ if text.is_empty() => flaw(offset, "a number is missing".to_owned()),
            _ => match self.names.first() {
                Some(name) => flaw(offset, format!("{text:?} is neither a number nor a name like {name}")),
                None => flaw(offset, format!("{text:?} is not a number")),
            },
        }
    }
}

fn refusal(kinds: &[Kind], words: &[(usize, &str)], number: usize, flaw: CronFieldError) -> String {
    let (kind, (at, _)) = (&kinds[number], words[number]);
    format!(
        "{}, in the {} field (number {} of {}, position {}); allowed there: {}, *, lists 1,3, ranges 1-5 and steps */2. {}",
        flaw.what,
        kind.name,
        number + 1,
        kinds.len(),
        at + flaw.offset,
        kind.allowed,
        meaning(kinds, words),
    )
}

/// The words of a text, each with its position in characters, from 1.
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

fn meaning(kinds: &[Kind], words: &[(usize, &str)]) -> String {
    let each = kinds.iter().zip(words).map(|(kind, (_, word))| match *word {
        "*" | "?" => format!("every {}", kind.name),
        _ => format!("{} {word}", kind.name),
    });
    format!("It reads: {}", each.collect::<Vec<_>>().join(", "))
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
        1..=4 => format!("{count} but {needed}{more}. {}", meaning(&KINDS[1..], words)),
        _ => format!("{count} but {needed}{more}"),
    }
}

fn unknown_name(text: &str) -> String {
    let at = words(text).first().map_or(1, |(at, _)| *at);
    let known: Vec<_> = NICKNAMES.iter().map(|(name, _)| *name).collect();
    let name = text.trim();
    let why = match name.split_whitespace().next().unwrap_or_default().to_lowercase().as_str() {
        "@every" => "for a fixed distance between runs give intervalMs instead of cronExpression",
        "@reboot" => "a schedule does not know of restarts; for a fixed distance between runs give intervalMs",
        _ => "for a fixed distance between runs give intervalMs",
    };
    format!("{name} (position {at}) is not known; known are {}; {why}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_said_with_its_field_and_position() {
        let reads = "It reads: minute 61, hour 2, every day of month, every month, day of week MON";
        let cases = [
            (
                "61 2 * * MON",
                format!(
                    "61 is not from 0 to 59, in the minute field (number 1 of 5, position 1); allowed there: 0-59, *, lists 1,3, ranges 1-5 and steps */2. {reads}"
                ),
            ),
            (
                "0 1,24 * * *",
                "24 is not from 0 to 23, in the hour field (number 2 of 5, position 5); allowed there: 0-23, *, lists 1,3, ranges 1-5 and steps */2. It reads: minute 0, hour 1,24, every day of month, every month, every day of week".into(),
            ),
        ];
        for (cron, message) in cases {
            assert_eq!(plain(cron, Precision::Seconds).unwrap_err(), message);
        }
        let short = [
            (
                "5/5 * * * *",
                "a step needs a range: write 5-59/5 instead of 5/5, in the minute field (number 1 of 5, position 1)",
            ),
            (
                "/5 * * * *",
                "the step /5 has nothing to step through: write */5, in the minute field (number 1 of 5, position 1)",
            ),
            (
                "*/0 * * * *",
                "the step \"0\" is not a number from 1 to 59, in the minute field (number 1 of 5, position 3)",
            ),
            (
                "*/x * * * *",
                "the step \"X\" is not a number from 1 to 59, in the minute field (number 1 of 5, position 3)",
            ),
            (
                "0 22-2 * * *",
                "the range 22-2 runs backwards: write 22-23,0-2, in the hour field (number 2 of 5, position 3)",
            ),
            ("0 0 * * 5-", "a number is missing, in the day of week field (number 5 of 5, position 11)"),
            (
                "0 0 1,,2 * *",
                "a value is missing next to the comma, in the day of month field (number 3 of 5, position 7)",
            ),
            (
                "0 0 * FOO *",
                "\"FOO\" is neither a number nor a name like JAN, in the month field (number 4 of 5, position 7)",
            ),
            ("MON 0 * * *", "\"MON\" is not a number, in the minute field (number 1 of 5, position 1)"),
            (
                "0 0 * * L",
                "L alone does not say which weekday: write 5L for the last Friday, in the day of week field (number 5 of 5, position 9)",
            ),
            (
                "0 0 * * MON#6",
                "\"6\" after # is not a number from 1 to 5, in the day of week field (number 5 of 5, position 13)",
            ),
            ("0 0 * * 8", "8 is not from 0 to 7, in the day of week field (number 5 of 5, position 9)"),
            ("0 0 0 * *", "0 is not from 1 to 31, in the day of month field (number 3 of 5, position 5)"),
            ("0 0 L-3 * *", "\"L\" is not a number, in the day of month field (number 3 of 5, position 5)"),
            ("ñ é 0 * * *", "\"Ñ\" is not a number, in the second field (number 1 of 6, position 1)"),
            ("0 60 0 * * *", "60 is not from 0 to 59, in the minute field (number 2 of 6, position 3)"),
            (
                "0 0 * * +5",
                "\"+5\" is neither a number nor a name like SUN, in the day of week field (number 5 of 5, position 9)",
            ),
        ];
        for (cron, begin) in short {
            let message = plain(cron, Precision::Seconds).unwrap_err();
            assert_eq!(message.split("; allowed there: ").next().unwrap(), begin, "{cron}");
        }
    }

    #[test]
    fn a_wrong_number_of_fields_and_unknown_names_are_refused() {
        let names = "known are @yearly, @annually, @monthly, @weekly, @daily, @midnight, @hourly";
        let cases = [
            ("", "is empty but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first".to_owned()),
            ("5 4 *", "has 3 fields but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first. It reads: minute 5, hour 4, every day of month".into()),
            ("0 0 0 1 1 * 2027", "has 7 fields but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first; there is no year field".into()),
            ("@reboot", format!("@reboot (position 1) is not known; {names}; a schedule does not know of restarts; for a fixed distance between runs give intervalMs")),
            (" @every 5m", format!("@every 5m (position 2) is not known; {names}; for a fixed distance between runs give intervalMs instead of cronExpression")),
            ("@noon", format!("@noon (position 1) is not known; {names}; for a fixed distance between runs give intervalMs")),
        ];
        for (cron, message) in cases {
            assert_eq!(plain(cron, Precision::Seconds).unwrap_err(), message);
        }
        assert_eq!(
            plain("0 0 0 * * *", Precision::Minutes).unwrap_err(),
            "has 6 fields but needs 5: minute, hour, day of month, month, day of week"
        );
    }
}
