//! Brokers that a test can start, kill and restart, and a proxy that can cut the connection to them.
//!
//! Needs only tokio and tempfile, so that the tests of other crates can include this file by its path.

#![allow(dead_code, unused_imports, reason = "each crate that includes this file uses a part of it")]

pub mod ports;
mod proxy;

use std::{
    env, fs,
    net::Ipv4Addr,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use ports::free_port;
pub use proxy::Proxy;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Returns an environment variable that `./test` sets.
pub fn required_variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run this test with ./test, which starts the brokers"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    RabbitMq,
    Nats,
    Redis,
}

/// A broker for one test alone, with its data in a temporary directory. Killed on drop.
pub struct Broker {
    kind: Kind,
    port: u16,
    /// RabbitMQ: the port of Erlang's name service, and the port of its distribution protocol.
    inner_ports: [u16; 2],
    directory: TempDir,
    processes: Vec<Child>,
}

impl Broker {
    /// Starts a broker with these lines of a `rabbitmq.conf`.
    pub async fn rabbitmq(config: &str) -> Broker {
        Broker::launch(Kind::RabbitMq, config).await
    }

    /// Starts a broker with these lines of a `nats-server.conf`.
    pub async fn nats(config: &str) -> Broker {
        Broker::launch(Kind::Nats, config).await
    }

    /// Starts a broker with these lines of a `redis.conf`. It confirms messages after they are on disk.
    pub async fn redis(config: &str) -> Broker {
        Broker::launch(Kind::Redis, config).await
    }

    async fn launch(kind: Kind, config: &str) -> Broker {
        let directory = tempfile::tempdir().expect("a temporary directory");
        fs::write(directory.path().join("broker.conf"), format!("{config}\n")).expect("the configuration file");
        let mut broker = Broker { kind, port: 0, inner_ports: [0, 0], directory, processes: Vec::new() };
        let mut last_error = String::new();
        // Another process may take a free port before the broker starts.
        for _ in 0..3 {
            (broker.port, broker.inner_ports) = (free_port(), [free_port(), free_port()]);
            match broker.try_start().await {
                Ok(()) => return broker,
                Err(error) => last_error = error,
            }
        }
        panic!("{last_error}");
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        self.url_with_port(self.port)
    }

    /// Returns the URL with another port, that of a proxy.
    pub fn url_with_port(&self, port: u16) -> String {
        match self.kind {
            Kind::RabbitMq => format!("amqp://guest:guest@127.0.0.1:{port}/%2f"),
            Kind::Nats => format!("nats://127.0.0.1:{port}"),
            Kind::Redis => format!("redis://127.0.0.1:{port}"),
        }
    }

    /// Starts the broker on its previous port and data, and waits until it answers.
    pub async fn start(&mut self) {
        assert!(self.processes.is_empty(), "the broker is running");
        self.try_start().await.unwrap_or_else(|error| panic!("{error}"));
    }

    async fn try_start(&mut self) -> Result<(), String> {
        for mut command in self.commands() {
            self.processes.push(command.spawn().map_err(|error| format!("cannot start {command:?}: {error}"))?);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.answers().await {
            let has_ended =
                self.processes.iter_mut().any(|process| process.try_wait().is_ok_and(|status| status.is_some()));
            if has_ended || Instant::now() > deadline {
                self.kill();
                return Err(format!("{:?} did not start: {}", self.kind, self.log()));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Ends the broker with SIGKILL.
    pub fn kill(&mut self) {
        for mut process in self.processes.drain(..).rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn commands(&self) -> Vec<Command> {
        let directory = self.directory.path().display().to_string();
        let (port, config) = (self.port.to_string(), format!("{directory}/broker.conf"));
        match self.kind {
            Kind::Nats => {
                let mut nats = bound_to_test(&required_variable("FAENA_TEST_NATS_BIN"));
                nats.args(["-a", "127.0.0.1", "-p", &port, "-js", "-sd", &format!("{directory}/data"), "-c", &config]);
                vec![self.logged(nats)]
            }
            Kind::Redis => {
                let mut redis = bound_to_test(&required_variable("FAENA_TEST_REDIS_BIN"));
                redis.args([&config, "--port", &port, "--bind", "127.0.0.1", "--dir", &directory, "--save", ""]);
                redis.args(["--appendonly", "yes", "--appendfsync", "always"]);
                vec![self.logged(redis)]
            }
            Kind::RabbitMq => self.rabbitmq_commands(&directory),
        }
    }

    fn rabbitmq_commands(&self, directory: &str) -> Vec<Command> {
        let [epmd_port, node_port] = self.inner_ports.map(|port| port.to_string());
        // A separate name service: the default one would outlive the test and be shared between tests.
        let mut epmd = bound_to_test("epmd");
        epmd.args(["-address", "127.0.0.1", "-port", &epmd_port]);
        let mut rabbitmq = bound_to_test(&required_variable("FAENA_TEST_RABBITMQ_BIN"));
        rabbitmq.env("HOME", directory).env("ERL_EPMD_PORT", &epmd_port).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        // Makes the start script `exec` the broker. As a child process the broker could outlive the script, or the reverse.
        rabbitmq.env("NOTIFY_SOCKET", "/nonexistent");
        for (name, value) in [
            ("NODENAME", format!("faena{}@localhost", self.port)),
            ("NODE_IP_ADDRESS", "127.0.0.1".into()),
            ("NODE_PORT", self.port.to_string()),
            ("DIST_PORT", node_port),
            ("MNESIA_BASE", format!("{directory}/data")),
            ("LOG_BASE", format!("{directory}/logs")),
            ("LOGS", "-".into()),
            ("PID_FILE", format!("{directory}/pid")),
            ("ENABLED_PLUGINS_FILE", format!("{directory}/plugins")),
            ("CONF_ENV_FILE", format!("{directory}/none")),
            ("CONFIG_FILE", format!("{directory}/broker.conf")),
            ("SERVER_ADDITIONAL_ERL_ARGS", "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none".into()),
        ] {
            rabbitmq.env(format!("RABBITMQ_{name}"), value);
        }
        vec![self.logged(epmd), self.logged(rabbitmq)]
    }

    fn logged(&self, mut command: Command) -> Command {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.path().join("log"))
            .expect("the log file");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("the log file")).stderr(log);
        command
    }

    async fn answers(&self) -> bool {
        let (request, expected): (&[u8], &[u8]) = match self.kind {
            Kind::RabbitMq => (b"AMQP\x00\x00\x09\x01", b"\x01"),
            Kind::Nats => (b"", b"INFO"),
            Kind::Redis => (b"PING\r\n", b"+PONG"),
        };
        let exchange = async {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await?;
            stream.write_all(request).await?;
            let mut response = vec![0; expected.len()];
            stream.read_exact(&mut response).await?;
            std::io::Result::Ok(response == expected)
        };
        matches!(tokio::time::timeout(Duration::from_secs(2), exchange).await, Ok(Ok(true)))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns a command that the kernel kills when the test process ends, even by SIGKILL.
fn bound_to_test(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]);
    command
}
