//! Stand-in until the real one is merged.
use crate::{Fault, Timestamp};
use serde::{Deserialize, Serialize};
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Timing {
    pub cron_expression: Option<String>,
    pub interval_ms: Option<u64>,
    pub timezone: String,
    pub dst_gap: Option<DstGap>,
    pub dst_overlap: Option<DstOverlap>,
    pub start_at: Option<Timestamp>,
    pub end_at: Option<Timestamp>,
    pub except: Vec<String>,
}
impl Default for Timing {
    fn default() -> Self {
        Timing {
            cron_expression: None,
            interval_ms: None,
            timezone: "UTC".into(),
            dst_gap: None,
            dst_overlap: None,
            start_at: None,
            end_at: None,
            except: Vec::new(),
        }
    }
}
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DstGap {
    Next,
    Skip,
}
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DstOverlap {
    First,
    Both,
}
#[derive(Clone, PartialEq, Debug)]
pub struct DstNote;
impl std::fmt::Display for DstNote {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Ok(())
    }
}
#[derive(Clone, PartialEq, Debug)]
pub struct Tick {
    pub due: Timestamp,
    pub note: Option<DstNote>,
    pub excepted: Option<String>,
}
pub struct Older {
    pub first: Timestamp,
    pub last: Timestamp,
    pub count: Option<u64>,
}
pub struct Backlog {
    pub latest: Vec<Tick>,
    pub older: Option<Older>,
}
pub struct Beat {
    interval_ms: i64,
    anchor: i64,
}
impl Timing {
    pub fn compile(&self, anchor: Timestamp) -> Result<Beat, Vec<Fault>> {
        Ok(Beat {
            interval_ms: self.interval_ms.unwrap_or(60_000) as i64,
            anchor: self.start_at.unwrap_or(anchor).as_ms(),
        })
    }
}
impl Beat {
    pub fn next(&self, after: Timestamp) -> Option<Tick> {
        let k = (after.as_ms() - self.anchor).div_euclid(self.interval_ms) + 1;
        Some(Tick { due: Timestamp::from_ms(self.anchor + k * self.interval_ms), note: None, excepted: None })
    }
    pub fn backlog(&self, after: Timestamp, upto: Timestamp, keep: usize) -> Backlog {
        let mut latest = Vec::new();
        let mut last = after;
        while let Some(tick) = self.next(last).filter(|tick| tick.due <= upto) {
            last = tick.due;
            latest.push(tick);
        }
        let drop = latest.len().saturating_sub(keep);
        latest.drain(..drop);
        Backlog { latest, older: None }
    }
    pub fn dst_gap(&self) -> DstGap {
        DstGap::Next
    }
    pub fn dst_overlap(&self) -> DstOverlap {
        DstOverlap::First
    }
    pub fn explain(&self) -> String {
        String::new()
    }
    pub fn local(&self, at: Timestamp) -> String {
        at.to_string()
    }
}
