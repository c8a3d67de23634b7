//! Charts as SVG. Colours are placeholders that the style sheet replaces, so that they follow the theme.

use charts_rs::{Color, LineChart, Series, Symbol};

use crate::markup::Markup;

const COMPLETED: &str = "#2A7336";
const FAILED: &str = "#C0322B";
const BACKGROUND: &str = "#101010";
const GRID: &str = "#202020";
const TEXT: &str = "#303030";

/// Width and height of a chart. It is drawn for the width that it gets, so that its labels keep their size.
#[derive(Clone, Copy)]
pub struct Size(f32, f32);

pub const WIDE: Size = Size(760.0, 230.0);
pub const NARROW: Size = Size(340.0, 190.0);

/// Draws how many jobs were completed and failed in each period, the oldest first.
pub fn finished(labels: Vec<String>, completed: Vec<f32>, failed: Vec<f32>, names: [&str; 2], size: Size) -> Markup {
    let mut series = vec![Series::new(names[0].to_owned(), completed), Series::new(names[1].to_owned(), failed)];
    series[0].fill = Some(true);
    let mut chart = LineChart::new(series, labels);
    (chart.width, chart.height) = (size.0, size.1);
    chart.background_color = Color::from(BACKGROUND);
    chart.grid.stroke_color = Color::from(GRID);
    chart.legend.show = Some(false);
    chart.series.colors = vec![Color::from(COMPLETED), Color::from(FAILED)];
    chart.series.symbol = Some(Symbol::None);
    chart.series.fill_opacity = Some(0.12);
    chart.x_axis.font.size = 11.0;
    chart.x_axis.font.color = Color::from(TEXT);
    chart.x_axis.stroke_color = Color::from(GRID);
    for axis in &mut chart.y_axis_configs {
        axis.font.size = 11.0;
        axis.font.color = Color::from(TEXT);
        axis.split_number = 4;
        axis.min = Some(0.0);
    }
    Markup::drawing(chart.svg().unwrap_or_default())
}
