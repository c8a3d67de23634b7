//! A command in a pseudo-terminal, and the screen that a person would see.

use std::{
    io::{Read, Write},
    num::NonZeroU16,
    process::{Child, Command},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use pty_process::{
    Size,
    blocking::{Pts, Pty, open},
};
use rustix::termios::{LocalModes, tcgetattr};
use vt100::Parser;

use crate::faena::{TIMEOUT, eventually};

/// Lines that have left the screen and can still be read.
const SCROLLBACK: usize = 10_000;

/// What the terminal received.
struct Received {
    parser: Parser,
    bytes: Vec<u8>,
}

/// A process in a terminal. Dropping it kills the process.
pub struct Terminal {
    child: Child,
    pty: Arc<Pty>,
    /// Kept open, so that the settings of the terminal can be read after the process has ended.
    pts: Option<Pts>,
    received: Arc<Mutex<Received>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Starts a command in a terminal of this size.
    pub fn start(command: Command, columns: u16, rows: u16) -> Terminal {
        Terminal::start_with(command, columns, rows, &[])
    }

    /// Starts a command in a terminal, with further environment variables.
    pub fn start_with(mut command: Command, columns: u16, rows: u16, environment: &[(&str, &str)]) -> Terminal {
        command.env("TERM", "xterm-256color").envs(environment.iter().copied());
        let (pty, pts) = open().unwrap();
        pty.resize(Size::new(rows, columns)).unwrap();
        let child = pty_process::blocking::Command::from(command).spawn_borrowed(&pts).unwrap();
        let size = |n: u16| NonZeroU16::new(n).unwrap();
        let parser = Parser::new(size(rows), size(columns), SCROLLBACK);
        let received = Arc::new(Mutex::new(Received { parser, bytes: Vec::new() }));
        let pty = Arc::new(pty);
        let reader = std::thread::spawn({
            let (pty, received) = (pty.clone(), received.clone());
            move || {
                let mut buffer = [0; 8_192];
                // Linux: the read fails when the other side is closed.
                while let Ok(n @ 1..) = (&*pty).read(&mut buffer) {
                    let mut received = received.lock().unwrap();
                    received.parser.process(&buffer[..n]);
                    received.bytes.extend_from_slice(&buffer[..n]);
                }
            }
        });
        Terminal { child, pty, pts: Some(pts), received, reader: Some(reader) }
    }

    /// Presses keys.
    pub fn send(&self, keys: &str) {
        (&*self.pty).write_all(keys.as_bytes()).unwrap();
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        let size = |n: u16| NonZeroU16::new(n).unwrap();
        self.received.lock().unwrap().parser.screen_mut().set_size(size(rows), size(columns));
        self.pty.resize(Size::new(rows, columns)).unwrap();
    }

    /// Returns the text on the screen.
    pub fn screen(&self) -> String {
        self.received.lock().unwrap().parser.screen().contents()
    }

    /// Returns everything that was received, with its escape sequences.
    pub fn bytes(&self) -> String {
        String::from_utf8_lossy(&self.received.lock().unwrap().bytes).into_owned()
    }

    /// Waits until the screen has all of these texts, and returns it.
    pub async fn wait_for(&self, texts: &[&str]) -> String {
        let started_at = Instant::now();
        loop {
            let screen = self.screen();
            if texts.iter().all(|text| screen.contains(text)) {
                return screen;
            }
            assert!(started_at.elapsed() < TIMEOUT, "expected {texts:?} on the screen:\n{screen}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asserts that no line continues on the next one.
    pub fn assert_nothing_wraps(&self) {
        let received = self.received.lock().unwrap();
        let screen = received.parser.screen();
        let (rows, _) = screen.size();
        let wrapped: Vec<u16> = (0..rows.get()).filter(|row| screen.row_wrapped(*row)).collect();
        assert!(wrapped.is_empty(), "lines {wrapped:?} wrap:\n{}", screen.contents());
    }

    /// Waits until the process has ended and returns its exit code.
    pub async fn wait_for_exit(&mut self) -> i32 {
        let status = eventually("the command ends", async || self.child.try_wait().unwrap()).await;
        status.code().unwrap_or_else(|| panic!("{status}: {}", self.screen()))
    }

    /// Asserts that the terminal is as it was before the command.
    pub fn assert_is_restored(&mut self) {
        let modes = tcgetattr(self.pts.as_ref().unwrap()).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG), "{modes:?}");
        self.read_to_end();
        let received = self.received.lock().unwrap();
        let screen = received.parser.screen();
        assert!(!screen.alternate_screen(), "the alternate screen is left");
        assert!(!screen.hide_cursor(), "the cursor is shown");
    }

    /// Reads what an ended process has written.
    pub fn read_to_end(&mut self) {
        self.pts = None;
        self.reader.take().unwrap().join().unwrap();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
