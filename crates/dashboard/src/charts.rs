//! Charts as SVG. Colours are placeholders that the style sheet replaces, so that they follow the theme.
//!
//! The plot is stretched to the available width. Labels are drawn outside the plot, so that they keep their size.

use askama::Template;
use charts_rs::{BarChart, Color, Series, SeriesCategory, Symbol};
use faena_domain::Timestamp;

use crate::{
    format::{Formats, iso},
    markup::Markup,
};

const COMPLETED: &str = "#2A7336";
const FAILED: &str = "#C0322B";
const BACKGROUND: &str = "#101010";
const GRID: &str = "#202020";
/// Size of the plot before it is stretched. The library leaves a fixed space between marks, so a wide plot has wide marks.
const WIDTH: f32 = 1_200.0;
const HEIGHT: f32 = 160.0;
/// Maximum number of lines above zero.
const MAX_LINES: u64 = 4;

/// Number of finished jobs in one period.
#[derive(Clone, Copy)]
pub struct Point {
    pub at: Timestamp,
    pub completed: u64,
    pub failed: u64,
}

/// How long a period is. It decides which times are labelled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Period {
    Minute,
    Hour,
}

impl Period {
    pub fn ms(self) -> i64 {
        match self {
            Period::Minute => 60_000,
            Period::Hour => 3_600_000,
        }
    }

    /// Returns the milliseconds from one label to the next.
    fn label_ms(self) -> i64 {
        match self {
            Period::Minute => 10 * 60_000,
            Period::Hour => 6 * 3_600_000,
        }
    }
}

/// A time under the plot, with its position in percent.
struct Label {
    x: f64,
    anchor: &'static str,
    at: String,
    text: String,
    /// Whether narrow charts leave it out.
    is_extra: bool,
}

#[derive(Template)]
#[template(path = "chart.html")]
struct Chart {
    /// The values of the lines, the largest first.
    values: Vec<String>,
    plot: Markup,
    labels: Vec<Label>,
    has_days: bool,
}

/// Draws how many jobs were completed and failed in each period, the oldest first. Failures are marks on the same axis.
pub fn finished(formats: Formats, points: &[Point], period: Period) -> Markup {
    let largest = points.iter().map(|point| point.completed.max(point.failed)).max().unwrap_or(0);
    let (step, lines) = scale(largest);
    Markup::of(&Chart {
        values: (0..=lines).rev().map(|line| formats.count(line * step)).collect(),
        plot: plot(points, step * lines, lines),
        labels: labels(formats, points, period),
        has_days: period == Period::Hour,
    })
}

/// Returns the distance of the lines of an axis, and how many there are above zero. The distance is 1, 2 or 5 times a
/// power of ten, so that every line is a round whole number.
fn scale(largest: u64) -> (u64, u64) {
    let mut power = 1;
    loop {
        for step in [power, 2 * power, 5 * power] {
            if step * MAX_LINES >= largest {
                return (step, largest.div_ceil(step).max(1));
            }
        }
        power *= 10;
    }
}

fn plot(points: &[Point], top: u64, lines: u64) -> Markup {
    let values = |pick: fn(&Point) -> u64| points.iter().map(|point| pick(point) as f32).collect::<Vec<f32>>();
    let mut completed = Series::new("completed".to_owned(), values(|point| point.completed));
    completed.category = Some(SeriesCategory::Line);
    completed.fill = Some(true);
    let mut series = vec![completed];
    let mut colors = vec![Color::from(COMPLETED)];
    // Without failures there is nothing to mark.
    if points.iter().any(|point| point.failed > 0) {
        series.push(Series::new("failed".to_owned(), values(|point| point.failed)));
        colors.push(Color::from(FAILED));
    }
    let mut chart = BarChart::new(series, points.iter().map(|_| String::new()).collect());
    (chart.width, chart.height) = (WIDTH, HEIGHT);
    chart.margin = 0.0.into();
    chart.background_color = Color::from(BACKGROUND);
    chart.grid.stroke_color = Color::from(GRID);
    chart.legend.show = Some(false);
    chart.series.colors = colors;
    chart.series.symbol = Some(Symbol::None);
    chart.series.fill_opacity = Some(0.12);
    chart.x_axis.hidden = true;
    chart.y_axis_hidden = true;
    for axis in &mut chart.y_axis_configs {
        axis.split_number = lines as usize;
        (axis.min, axis.max) = (Some(0.0), Some(top as f32));
    }
    let svg = chart.svg().unwrap_or_default();
    Markup::drawing(svg.replacen("<svg ", "<svg class=\"plot\" preserveAspectRatio=\"none\" ", 1))
}

fn labels(formats: Formats, points: &[Point], period: Period) -> Vec<Label> {
    let mut labels: Vec<Label> = Vec::new();
    for (index, point) in points.iter().enumerate() {
        if point.at.as_ms() % period.label_ms() != 0 {
            continue;
        }
        let x = ((index as f64 + 0.5) / points.len() as f64 * 1_000.0).round() / 10.0;
        let anchor = match x {
            ..4.0 => "start",
            96.0.. => "end",
            _ => "middle",
        };
        let text = match period {
            Period::Minute => formats.hour_and_minute(point.at),
            Period::Hour => format!("{} {}", formats.weekday(point.at), formats.hour_and_minute(point.at)),
        };
        labels.push(Label { x, anchor, at: iso(point.at), text, is_extra: labels.len() % 2 == 1 });
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    /// 2026-11-18 00:00 UTC, a Wednesday.
    const MIDNIGHT: i64 = 1_794_960_000_000;

    fn drawn(counts: &[(u64, u64)], period: Period) -> String {
        let point = |(index, &(completed, failed)): (usize, &(u64, u64))| Point {
            at: Timestamp::from_ms(MIDNIGHT + index as i64 * period.ms()),
            completed,
            failed,
        };
        let points: Vec<Point> = counts.iter().enumerate().map(point).collect();
        let formats = Formats { language: Language::English, now: Timestamp::from_ms(MIDNIGHT), is_live: false };
        finished(formats, &points, period).to_string()
    }

    #[test]
    fn the_lines_of_an_axis_are_round_whole_numbers() {
        assert_eq!([0, 1, 3, 4, 5].map(scale), [(1, 1), (1, 1), (1, 3), (1, 4), (2, 3)]);
        assert_eq!([61, 101, 128, 18_204].map(scale), [(20, 4), (50, 3), (50, 3), (5_000, 4)]);
    }

    #[test]
    fn failures_are_drawn_only_if_there_are_any() {
        let (without, with) = (drawn(&[(3, 0), (4, 0)], Period::Minute), drawn(&[(3, 0), (4, 2)], Period::Minute));
        assert!(without.contains(COMPLETED) && !without.contains(FAILED), "{without}");
        assert!(with.contains(COMPLETED) && with.contains(FAILED), "{with}");
        assert!(!with.contains("NaN") && !with.contains("style="), "{with}");
    }

    #[test]
    fn round_times_are_labelled_and_hours_have_their_day() {
        let minutes = drawn(&[(1, 0); 21], Period::Minute);
        assert_eq!(minutes.matches("data-at=").count(), 3, "{minutes}");
        assert!(minutes.contains(">00:00<") && minutes.contains(">00:20<"), "{minutes}");
        let hours = drawn(&[(1, 0); 30], Period::Hour);
        assert_eq!(hours.matches("data-at=").count(), 5, "{hours}");
        assert!(hours.contains(">Wed 18:00<") && hours.contains(">Thu 00:00<"), "{hours}");
    }
}
