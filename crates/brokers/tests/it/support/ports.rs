//! Ports for servers that a test starts, or restarts on the same port.

use std::{
    hash::{BuildHasher, RandomState},
    net::{Ipv4Addr, TcpListener},
};

/// Listens on a free port below those that the kernel gives to outgoing connections. Once the listener is dropped, no
/// connection of another test can take the port, as it could with a port that the kernel chose.
pub fn listen() -> TcpListener {
    let random = RandomState::new();
    let ports = (0..1_000).map(|attempt: u32| 20_000 + (random.hash_one(attempt) % 12_000) as u16);
    ports.into_iter().find_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()).expect("a free port")
}

pub fn free_port() -> u16 {
    listen().local_addr().expect("the local address").port()
}
