//! Redis servers of tests: the shared one of `./test`, and private ones that a test may break.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use faena_queue::{RedisQueue, RedisQueueOptions};

/// Returns a queue under a prefix of its own on the shared server.
pub fn shared() -> (RedisQueue, String) {
    let url = std::env::var("FAENA_TEST_REDIS").expect("FAENA_TEST_REDIS is not set: run this test with ./test");
    let prefix = format!("test-{}", uuid::Uuid::new_v4().simple());
    (queue(&url, &prefix), prefix)
}

pub fn queue(url: &str, prefix: &str) -> RedisQueue {
    RedisQueue::new(RedisQueueOptions {
        address: url.parse().unwrap(),
        prefix: prefix.to_owned(),
        timeout: Duration::from_secs(5),
        round_trip: Box::new(|_| ()),
    })
}

/// A server of one test. Killed at its end.
pub struct Server {
    child: Child,
    pub port: u16,
    _folder: tempfile::TempDir,
}

impl Server {
    pub fn start(arguments: &[&str]) -> Server {
        Server::on(free_port(), arguments)
    }

    pub fn on(port: u16, arguments: &[&str]) -> Server {
        let program = std::env::var("FAENA_TEST_REDIS_BIN").unwrap_or_else(|_| "redis-server".into());
        let folder = tempfile::tempdir().unwrap();
        let child = Command::new(program)
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .args(["--dir", folder.path().to_str().unwrap()])
            .args(arguments)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server { child, port, _folder: folder };
        let began = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(30), "Redis did not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs one command on a server.
pub async fn command(url: &str, words: &[&str]) -> ::redis::Value {
    let mut connection = ::redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
    let mut command = ::redis::cmd(words[0]);
    for word in &words[1..] {
        command.arg(*word);
    }
    command.query_async(&mut connection).await.unwrap()
}

/// Repeats `look` until it returns a value.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
