//! Engines in processes of their own, and servers that ask them.

use std::process::{Child, Command, ExitStatus, Stdio};

use super::support::*;

/// A process of `infernum engine` with the demo model; ends with the test.
pub(crate) struct Engine {
    process: Child,
    pub(crate) address: String,
    more: Vec<String>,
    _folder: tempfile::TempDir,
}

impl Engine {
    pub(crate) fn start(more: &[&str]) -> Engine {
        let folder = tempfile::tempdir().expect("a folder");
        let address = format!("ipc://{}/engine", folder.path().display());
        let more: Vec<String> = more.iter().map(|&text| text.to_owned()).collect();
        let process = Engine::launch(&address, &more);
        Engine { process, address, more, _folder: folder }
    }

    fn launch(address: &str, more: &[String]) -> Child {
        let mut command = binary();
        command.args(["engine", "--device", "cpu", "--listen", address]).args(more);
        command.stderr(Stdio::null()).spawn().expect("the binary runs")
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it ended");
    }

    pub(crate) fn restart(&mut self) {
        self.process = Engine::launch(&self.address, &self.more);
    }

    pub(crate) fn restart_as(&mut self, more: &[&str]) {
        self.more = more.iter().map(|&text| text.to_owned()).collect();
        self.restart();
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until it has ended by itself.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        self.process.wait().expect("it ended")
    }

    pub(crate) fn path(&self) -> &str {
        self.address.strip_prefix("ipc://").expect("it is one")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// A server that asks these engines.
pub(crate) fn front_end(engines: &[&Engine], more: &[&str]) -> Server {
    front_end_of(engines, more, engines.len())
}

/// One of which so many are there.
pub(crate) fn front_end_of(engines: &[&Engine], more: &[&str], there: usize) -> Server {
    let mut command = binary();
    command.args(["serve", "--port", "0"]).args(more);
    for engine in engines {
        command.args(["--engine", &engine.address]);
    }
    let server = Server::spawn(command);
    wait("its engines are there", || {
        server.get("/health").status == 200 && server.metrics("infernum:engines{") >= there as f64
    });
    server
}

/// How the engines of a server stand: requests that run and wait, and the part of the cache that is held.
pub(crate) fn load(server: &Server) -> [f64; 3] {
    ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
        .map(|name| server.metric(&format!("infernum:{name}{{")))
}

pub(crate) fn idle(what: &str, server: &Server) {
    wait(what, || load(server) == [0.0; 3]);
}

/// How often something is killed: more by INFERNUM_KILLS.
pub(crate) fn repeats(default: usize) -> usize {
    std::env::var("INFERNUM_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}
