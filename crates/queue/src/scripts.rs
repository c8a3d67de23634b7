//! The Lua scripts of the queue. Redis runs each of them atomically.

use std::sync::LazyLock;

use redis::Script;

macro_rules! script {
    ($name:ident, $file:literal) => {
        pub static $name: LazyLock<LuaScript> =
            LazyLock::new(|| LuaScript::new(include_str!(concat!("scripts/", $file))));
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
pub struct LuaScript {
    pub code: &'static str,
    pub hash: String,
}

impl LuaScript {
    fn new(code: &'static str) -> LuaScript {
        LuaScript { code, hash: Script::new(code).get_hash().to_owned() }
    }
}
