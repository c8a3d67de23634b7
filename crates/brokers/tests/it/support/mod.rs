//! Brokers that a test may start, kill and restart, and a line to them that it may cut. Needs only tokio and tempfile, so that the tests of other crates
//! can include this file by its path.

#![allow(dead_code, reason = "each test crate that includes this uses a part of it")]

mod proxy;

use std::{
    env, fs,
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

pub use proxy::Proxy;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// What `./test` has set up, or whoever works on one test by hand.
pub fn setting(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run this test by ./test, which starts the brokers"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    RabbitMq,
    Nats,
    Redis,
}

/// A broker of its own for one test, with its data in a temporary folder. Killed when dropped.
pub struct Broker {
    kind: Kind,
    port: u16,
    /// RabbitMQ: of Erlang's name service, and between nodes.
    inner_ports: [u16; 2],
    folder: TempDir,
    processes: Vec<Child>,
}

impl Broker {
    /// `config` are lines of a `rabbitmq.conf`.
    pub async fn rabbitmq(config: &str) -> Broker {
        Broker::begin(Kind::RabbitMq, config).await
    }

    /// `config` are lines of a `nats-server.conf`.
    pub async fn nats(config: &str) -> Broker {
        Broker::begin(Kind::Nats, config).await
    }

    /// `config` are lines of a `redis.conf`. Everything is on disk before it is confirmed.
    pub async fn redis(config: &str) -> Broker {
        Broker::begin(Kind::Redis, config).await
    }

    async fn begin(kind: Kind, config: &str) -> Broker {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("broker.conf"), format!("{config}\n")).expect("the configuration");
        let mut broker = Broker { kind, port: 0, inner_ports: [0, 0], folder, processes: Vec::new() };
        let mut reason = String::new();
        // Somebody may take a port between the moment it is found free and the start.
        for _ in 0..3 {
            (broker.port, broker.inner_ports) = (free_port(), [free_port(), free_port()]);
            match broker.try_start().await {
                Ok(()) => return broker,
                Err(told) => reason = told,
            }
        }
        panic!("{reason}");
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        self.url_by(self.port)
    }

    /// Its address by way of another port, a proxy's.
    pub fn url_by(&self, port: u16) -> String {
        match self.kind {
            Kind::RabbitMq => format!("amqp://guest:guest@127.0.0.1:{port}/%2f"),
            Kind::Nats => format!("nats://127.0.0.1:{port}"),
            Kind::Redis => format!("redis://127.0.0.1:{port}"),
        }
    }

    /// Starts it on the port and data it had before, and waits until it answers.
    pub async fn start(&mut self) {
        assert!(self.processes.is_empty(), "it runs already");
        self.try_start().await.unwrap_or_else(|reason| panic!("{reason}"));
    }

    async fn try_start(&mut self) -> Result<(), String> {
        for mut command in self.commands() {
            self.processes.push(command.spawn().map_err(|error| format!("cannot start {command:?}: {error}"))?);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.answers().await {
            let ended =
                self.processes.iter_mut().any(|process| process.try_wait().is_ok_and(|status| status.is_some()));
            if ended || Instant::now() > deadline {
                self.kill();
                return Err(format!("{:?} did not start: {}", self.kind, self.log()));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Ends it as a power cut would: SIGKILL.
    pub fn kill(&mut self) {
        for mut process in self.processes.drain(..).rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn commands(&self) -> Vec<Command> {
        let folder = self.folder.path().display().to_string();
        let (port, config) = (self.port.to_string(), format!("{folder}/broker.conf"));
        match self.kind {
            Kind::Nats => {
                let mut nats = bound(&setting("FAENA_TEST_NATS_BIN"));
                nats.args(["-a", "127.0.0.1", "-p", &port, "-js", "-sd", &format!("{folder}/data"), "-c", &config]);
                vec![self.logged(nats)]
            }
            Kind::Redis => {
                let mut redis = bound(&setting("FAENA_TEST_REDIS_BIN"));
                redis.args([&config, "--port", &port, "--bind", "127.0.0.1", "--dir", &folder, "--save", ""]);
                redis.args(["--appendonly", "yes", "--appendfsync", "always"]);
                vec![self.logged(redis)]
            }
            Kind::RabbitMq => self.rabbitmq_commands(&folder),
        }
    }

    fn rabbitmq_commands(&self, folder: &str) -> Vec<Command> {
        let [names_port, node_port] = self.inner_ports.map(|port| port.to_string());
        // A name service of its own: the usual one would stay behind, and stand between tests.
        let mut names = bound("epmd");
        names.args(["-address", "127.0.0.1", "-port", &names_port]);
        let mut rabbitmq = bound(&setting("FAENA_TEST_RABBITMQ_BIN"));
        rabbitmq.env("HOME", folder).env("ERL_EPMD_PORT", &names_port).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        // With this the start script becomes the broker, instead of a parent that would survive it or be survived.
        rabbitmq.env("NOTIFY_SOCKET", "/nonexistent");
        for (name, value) in [
            ("NODENAME", format!("faena{}@localhost", self.port)),
            ("NODE_IP_ADDRESS", "127.0.0.1".into()),
            ("NODE_PORT", self.port.to_string()),
            ("DIST_PORT", node_port),
            ("MNESIA_BASE", format!("{folder}/data")),
            ("LOG_BASE", format!("{folder}/logs")),
            ("LOGS", "-".into()),
            ("PID_FILE", format!("{folder}/pid")),
            ("ENABLED_PLUGINS_FILE", format!("{folder}/plugins")),
            ("CONF_ENV_FILE", format!("{folder}/none")),
            ("CONFIG_FILE", format!("{folder}/broker.conf")),
            ("SERVER_ADDITIONAL_ERL_ARGS", "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none".into()),
        ] {
            rabbitmq.env(format!("RABBITMQ_{name}"), value);
        }
        vec![self.logged(names), self.logged(rabbitmq)]
    }

    fn logged(&self, mut command: Command) -> Command {
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.folder.path().join("log")).expect("its log");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("its log")).stderr(log);
        command
    }

    async fn answers(&self) -> bool {
        let (greeting, answer): (&[u8], &[u8]) = match self.kind {
            Kind::RabbitMq => (b"AMQP\x00\x00\x09\x01", b"\x01"),
            Kind::Nats => (b"", b"INFO"),
            Kind::Redis => (b"PING\r\n", b"+PONG"),
        };
        let asking = async {
            let mut line = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await?;
            line.write_all(greeting).await?;
            let mut said = vec![0; answer.len()];
            line.read_exact(&mut said).await?;
            std::io::Result::Ok(said == answer)
        };
        matches!(tokio::time::timeout(Duration::from_secs(2), asking).await, Ok(Ok(true)))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A program that cannot outlive the test, even if that is killed.
fn bound(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]);
    command
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}
