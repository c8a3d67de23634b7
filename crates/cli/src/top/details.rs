//! The page of one job.

use faena::Job;

use crate::{jobs, output::one_line};

/// The job that is open.
pub struct Details {
    pub id: String,
    /// `None` until it was read.
    pub job: Option<Job>,
    /// Why the job cannot be read.
    pub outage: Option<String>,
    lines: Vec<String>,
    /// First line that is visible.
    offset: usize,
    /// Lines that fit on the screen.
    height: usize,
}

impl Details {
    pub fn new(id: String) -> Details {
        Details { id, job: None, outage: None, lines: Vec::new(), offset: 0, height: 0 }
    }

    pub fn update(&mut self, job: Job) {
        // A reader at the end of the log stays there.
        let was_at_end = self.offset > 0 && self.offset >= self.last_offset();
        self.lines = jobs::describe(&job).lines().map(one_line).collect();
        self.job = Some(job);
        self.outage = None;
        self.offset = if was_at_end { self.last_offset() } else { self.offset.min(self.last_offset()) };
    }

    /// Returns the lines to draw on an area of this height.
    pub fn visible(&mut self, height: usize) -> &[String] {
        self.height = height;
        self.offset = self.offset.min(self.last_offset());
        &self.lines[self.offset..self.lines.len().min(self.offset + height)]
    }

    /// Returns the numbers of the first and the last visible line, and of the last line.
    pub fn position(&self) -> (usize, usize, usize) {
        (self.offset + 1, self.lines.len().min(self.offset + self.height), self.lines.len())
    }

    pub fn scroll(&mut self, lines: isize) {
        self.offset = self.offset.saturating_add_signed(lines).min(self.last_offset());
    }

    fn last_offset(&self) -> usize {
        self.lines.len().saturating_sub(self.height)
    }
}
