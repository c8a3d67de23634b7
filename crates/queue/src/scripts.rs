//! The Lua scripts of the queue. Redis runs each of them atomically.

use std::sync::LazyLock;

use redis::Script;

macro_rules! script {
    ($name:ident, $file:literal) => {
        pub static $name: LazyLock<MoveScript> =
            LazyLock::new(|| MoveScript::new(include_str!(concat!("scripts/", $file))));
    };
}

script!(TAKE, "take.lua");
script!(PUT, "put.lua");
script!(DELAY, "delay.lua");
script!(GRANT, "grant.lua");
script!(FINISH, "finish.lua");
script!(REMOVE, "remove.lua");
script!(PREPARE, "prepare.lua");
script!(STATS, "stats.lua");
script!(WORKERS, "workers.lua");

/// A script with the hash by which Redis knows it.
pub struct MoveScript {
    pub code: &'static str,
    pub hash: String,
}

impl MoveScript {
    fn new(code: &'static str) -> MoveScript {
        MoveScript { code, hash: Script::new(code).get_hash().to_owned() }
    }
}
