//! Opens the terminal's alternate screen for `faena top`, and restores the terminal.

use std::io::{self, stdout};

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::{cursor, execute},
};

/// The whole screen of the terminal. Dropping it restores what was there before.
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Switches to the alternate screen. A panic restores the screen before its message is printed.
    pub fn open() -> io::Result<Screen> {
        let opened = ratatui::try_init();
        if opened.is_err() {
            restore();
        }
        Ok(Screen(opened?))
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        self.0.draw(draw).map(|_| ())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal. Ignores errors: the terminal may be closed.
fn restore() {
    let _ = ratatui::try_restore();
    let _ = execute!(stdout(), cursor::Show);
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use pty_process::blocking::{Command, open};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::Screen;

    /// Set in the process that panics.
    const CHILD: &str = "FAENA_TEST_PANIC";

    /// Runs this test again in a pseudo-terminal, in a child process that panics.
    #[test]
    fn a_panic_restores_the_terminal_before_its_message() {
        if std::env::var_os(CHILD).is_some() {
            let mut screen = Screen::open().expect("a terminal");
            screen.draw(|_| {}).expect("a terminal");
            panic!("this is a bug");
        }
        let (mut pty, pts) = open().expect("a terminal");
        let name = "top::screen::tests::a_panic_restores_the_terminal_before_its_message";
        let command = Command::new(std::env::current_exe().expect("this program"));
        let mut command = command.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
        let status = command.spawn_borrowed(&pts).expect("it starts").wait().expect("it ends");
        assert!(!status.success());
        let modes = tcgetattr(&pts).expect("settings").local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
        // The command has open copies of the terminal, with which the read below would not end.
        drop((command, pts));
        let mut received = Vec::new();
        // Linux: the read fails when the other side is closed.
        let _ = pty.read_to_end(&mut received);
        let received = String::from_utf8_lossy(&received);
        let position = |text: &str| received.find(text).unwrap_or_else(|| panic!("{text:?} in {received:?}"));
        assert!(position("\x1b[?1049h") < position("\x1b[?1049l"));
        assert!(position("\x1b[?1049l") < position("this is a bug"), "{received:?}");
        assert!(received.rfind("\x1b[?25h") > received.rfind("\x1b[?25l"), "the cursor is shown: {received:?}");
    }
}
