//! Describes cron expressions in Spanish: `A las 02:30, los lunes`.
//!
//! The crate croner describes them in English. Its translations keep some English words, so this is written from the parsed fields.

use super::cron::Cron;

const WEEKDAYS: [&str; 7] = ["domingo", "lunes", "martes", "miércoles", "jueves", "viernes", "sábado"];
const MONTHS: [&str; 12] = [
    "enero",
    "febrero",
    "marzo",
    "abril",
    "mayo",
    "junio",
    "julio",
    "agosto",
    "septiembre",
    "octubre",
    "noviembre",
    "diciembre",
];
const ORDINALS: [&str; 5] = ["primer", "segundo", "tercer", "cuarto", "quinto"];
/// Maximum number of times of a day that are listed one by one.
const MAX_TIMES: usize = 4;

/// The values of a field.
enum Values {
    All,
    /// Every n-th value from 0 on; the step divides their number.
    Every(usize),
    Some(Vec<u16>),
}

impl Values {
    fn of(mask: u64, count: usize) -> Values {
        let set: Vec<u16> = (0..64).filter(|bit| mask >> bit & 1 == 1).collect();
        let is_step = |step: &usize| {
            count.is_multiple_of(*step)
                && set.len() == count / step
                && set.iter().all(|value| usize::from(*value).is_multiple_of(*step))
        };
        match (1..=count / 2).find(is_step) {
            Some(1) => Values::All,
            Some(step) => Values::Every(step),
            None => Values::Some(set),
        }
    }

    fn single(&self) -> Option<u16> {
        match self {
            Values::Some(set) if set.len() == 1 => set.first().copied(),
            _ => None,
        }
    }
}

/// Describes an expression: its times, then its days and months if it has any.
pub(super) fn describe(cron: &Cron) -> String {
    let parts = [Some(times(cron)), days(cron), months(cron)];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn times(cron: &Cron) -> String {
    let (seconds, minutes, hours) = cron.time_masks();
    let (seconds, minutes, hours) = (Values::of(seconds, 60), Values::of(minutes, 60), Values::of(hours, 24));
    if let (Some(second), Values::Some(minutes), Values::Some(hours)) = (seconds.single(), &minutes, &hours)
        && minutes.len() * hours.len() <= MAX_TIMES
    {
        let second = if second == 0 { String::new() } else { format!(":{second:02}") };
        let times = hours.iter().flat_map(|hour| minutes.iter().map(move |minute| (hour, minute)));
        let times: Vec<String> = times.map(|(hour, minute)| format!("{hour:02}:{minute:02}{second}")).collect();
        return format!("A las {}", list(&times));
    }
    let has_seconds = seconds.single() != Some(0);
    let mut text = if has_seconds { seconds_text(&seconds, &minutes) } else { String::new() };
    match (&minutes, has_seconds) {
        (Values::All, true) => {}
        (Values::All, false) => text.push_str("Cada minuto"),
        (Values::Every(step), true) => text.push_str(&format!(", cada {step} minutos")),
        (Values::Every(step), false) => text.push_str(&format!("Cada {step} minutos")),
        (Values::Some(set), true) => text.push_str(&format!(" {}", of_values(set, ["del minuto", "de los minutos"]))),
        (Values::Some(set), false) => text.push_str(&of_values(set, ["En el minuto", "En los minutos"])),
    }
    match (&hours, &minutes) {
        (Values::All, Values::Some(_)) => text.push_str(" de cada hora"),
        (Values::All, _) => {}
        (Values::Every(step), _) => text.push_str(&format!(", cada {step} horas")),
        (Values::Some(set), _) => text.push_str(&format!(" {}", of_values(set, ["de la hora", "de las horas"]))),
    }
    text
}

fn seconds_text(seconds: &Values, minutes: &Values) -> String {
    match seconds {
        Values::All => "Cada segundo".to_owned(),
        Values::Every(step) => format!("Cada {step} segundos"),
        Values::Some(set) => {
            let text = of_values(set, ["En el segundo", "En los segundos"]);
            // `times` describes all other minutes.
            if matches!(minutes, Values::All) { format!("{text} de cada minuto") } else { text }
        }
    }
}

/// Lists numbers after the words that fit: `one` for a single number, `several` for more.
fn of_values(set: &[u16], [one, several]: [&str; 2]) -> String {
    let words = if set.len() == 1 { one } else { several };
    format!("{words} {}", list(&ranges(set)))
}

/// Writes three or more consecutive numbers as a range.
fn ranges(set: &[u16]) -> Vec<String> {
    let mut items = Vec::new();
    for run in set.chunk_by(|a, b| a + 1 == *b) {
        match run {
            [first, _, .., last] => items.push(format!("{first}-{last}")),
            few => items.extend(few.iter().map(ToString::to_string)),
        }
    }
    items
}

/// Joins items: `a, b y c`.
fn list(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} y {last}", first.join(", ")),
    }
}

/// Returns the days of the month and of the week. If both are limited, either is enough.
fn days(cron: &Cron) -> Option<String> {
    let (month_days, weekdays) = cron.day_fields();
    let parts: Vec<String> =
        [month_days.map(days_of_month), weekdays.map(days_of_week)].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(" o "))
}

/// Returns the words for days of the month: plain ones, and those with a letter.
fn days_of_month((set, special): (Vec<u16>, Vec<&str>)) -> String {
    let mut parts = Vec::new();
    if !set.is_empty() {
        parts.push(of_values(&set, ["el día", "los días"]));
    }
    parts.extend(special.into_iter().map(|item| match item {
        "L" => "el último día del mes".to_owned(),
        "LW" => "el último día laborable del mes".to_owned(),
        item => format!("el día laborable más cercano al día {}", item.trim_end_matches('W')),
    }));
    list(&parts)
}

/// Returns the words for days of the week: plain ones, `5L` (the last) and `1#2` (the second).
fn days_of_week((set, special): (Vec<u16>, Vec<&str>)) -> String {
    let name = |day: u16| WEEKDAYS[usize::from(day) % 7];
    let named = |item: &str| item.parse().map_or(item.to_owned(), |day| name(day).to_owned());
    let mut parts = Vec::new();
    for run in set.chunk_by(|a, b| a + 1 == *b) {
        match run {
            [first, _, .., last] => parts.push(format!("de {} a {}", name(*first), name(*last))),
            few => parts.extend(few.iter().map(|day| {
                // Only the weekend has a plural of its own.
                let plural = if matches!(day % 7, 0 | 6) { "s" } else { "" };
                format!("los {}{plural}", name(*day))
            })),
        }
    }
    parts.extend(special.into_iter().map(|item| match item.split_once('#') {
        Some((day, number)) => {
            let ordinal = number.parse::<usize>().ok().and_then(|number| ORDINALS.get(number.checked_sub(1)?));
            format!("el {} {} del mes", ordinal.unwrap_or(&"último"), named(day))
        }
        None => format!("el último {} del mes", named(item.trim_end_matches('L'))),
    }));
    list(&parts)
}

fn months(cron: &Cron) -> Option<String> {
    let set: Vec<String> = cron.months().into_iter().map(|month| MONTHS[month - 1].to_owned()).collect();
    (set.len() < MONTHS.len()).then(|| format!("en {}", list(&set)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::cron_fields::Precision;

    #[test]
    fn every_kind_of_expression_is_described() {
        for (text, words) in [
            ("30 2 * * *", "A las 02:30"),
            ("30 2 * * MON", "A las 02:30, los lunes"),
            ("0 9,12,17 * * 1-5", "A las 09:00, 12:00 y 17:00, de lunes a viernes"),
            ("* * * * *", "Cada minuto"),
            ("*/15 * * * *", "Cada 15 minutos"),
            ("*/40 * * * *", "En los minutos 0 y 40 de cada hora"),
            ("@hourly", "En el minuto 0 de cada hora"),
            ("0 */2 * * *", "En el minuto 0, cada 2 horas"),
            ("0 9-17 * * *", "En el minuto 0 de las horas 9-17"),
            ("*/10 8-18 * * *", "Cada 10 minutos de las horas 8-18"),
            ("* 5 * * *", "Cada minuto de la hora 5"),
            ("*/20 * * * * *", "Cada 20 segundos"),
            ("* * * * * *", "Cada segundo"),
            ("30 0 14 * * *", "A las 14:00:30"),
            ("30 * * * * *", "En el segundo 30 de cada minuto"),
            ("30 5 * * * *", "En el segundo 30 del minuto 5 de cada hora"),
            ("5 4 L * *", "A las 04:05, el último día del mes"),
            ("0 0 LW 1 *", "A las 00:00, el último día laborable del mes, en enero"),
            ("0 0 15W * *", "A las 00:00, el día laborable más cercano al día 15"),
            ("0 12 1,15 JAN-DEC/6 *", "A las 12:00, los días 1 y 15, en enero y julio"),
            ("0 9 * * mon#1", "A las 09:00, el primer lunes del mes"),
            ("0 9 * * FRIL", "A las 09:00, el último viernes del mes"),
            ("0 0 13 * FRI", "A las 00:00, el día 13 o los viernes"),
            ("0 0 * * 0,6", "A las 00:00, los domingos y los sábados"),
            ("0 0 1-7 * ?", "A las 00:00, los días 1-7"),
        ] {
            assert_eq!(describe(&Cron::parse(text, Precision::Seconds).unwrap()), words, "{text}");
        }
    }
}
