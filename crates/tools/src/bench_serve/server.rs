//! A server of our own, for as long as it is driven.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::http::Http;
use crate::process::peak_memory;

/// How long a server may take to load its model.
const START: Duration = Duration::from_secs(600);
/// How long it may take to end after SIGTERM.
const STOP: Duration = Duration::from_secs(30);
/// Of what it wrote, what is shown when it fails.
const TAIL: i64 = 2000;

/// A running server; stopped when dropped.
pub(super) struct Server {
    child: Child,
    output: File,
    pub(super) url: String,
}

impl Server {
    /// Starts a command, in which `{port}` stands for a free port, and waits until it is healthy.
    pub(super) fn start(command: &[String], runtime: &Runtime) -> Result<Server, String> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
        let port = free.map_err(|e| format!("no free port: {e}"))?.port().to_string();
        let mut words = command.iter().map(|word| word.replace("{port}", &port));
        let program = words.next().ok_or("the command is empty")?;
        let output = tempfile::tempfile().map_err(|e| format!("no temporary file: {e}"))?;
        let clone = || output.try_clone().map_err(|e| format!("no temporary file: {e}"));
        let child = Command::new(&program)
            .args(words)
            .stdin(Stdio::null())
            .stdout(clone()?)
            .stderr(clone()?)
            .spawn()
            .map_err(|e| format!("{program}: {e}"))?;
        let mut server = Server { child, output, url: format!("http://127.0.0.1:{port}") };
        server.wait_until_healthy(runtime)?;
        Ok(server)
    }

    fn wait_until_healthy(&mut self, runtime: &Runtime) -> Result<(), String> {
        let http = Http::new(&self.url, None).map_err(|e| e.to_string())?;
        let start = Instant::now();
        while start.elapsed() < START {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("it ended ({status}): {}", self.told()));
            }
            let health = runtime.block_on(http.get("/health"));
            if health.is_ok_and(|(status, _)| status.is_success()) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(format!("not healthy after {} s: {}", START.as_secs(), self.told()))
    }

    /// The last of what it wrote.
    fn told(&mut self) -> String {
        let mut tail = Vec::new();
        let end = self.output.seek(SeekFrom::End(0)).unwrap_or(0);
        let back = -TAIL.min(end as i64);
        let read = self.output.seek(SeekFrom::End(back));
        let _ = read.and_then(|_| self.output.read_to_end(&mut tail));
        String::from_utf8_lossy(&tail).trim().to_owned()
    }

    /// The most memory it has held, where the system tells.
    pub(super) fn peak_memory(&self) -> Option<u64> {
        peak_memory(self.child.id())
    }

    /// Asks it to end, and waits; an error says how it did not end well.
    pub(super) fn stop(mut self) -> Result<(), String> {
        self.terminate();
        let start = Instant::now();
        while start.elapsed() < STOP {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() || ended_by_term(status) => return Ok(()),
                Ok(Some(status)) => return Err(format!("it ended ({status}): {}", self.told())),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        Err(format!("it had not ended {} s after SIGTERM", STOP.as_secs()))
    }

    #[cfg(unix)]
    fn terminate(&mut self) {
        use rustix::process::{Pid, Signal, kill_process};
        // It may have ended by itself.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }

    #[cfg(not(unix))]
    fn terminate(&mut self) {
        let _ = self.child.kill();
    }
}

/// Python servers do not catch the signal.
#[cfg(unix)]
fn ended_by_term(status: std::process::ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(&status)
        == Some(rustix::process::Signal::TERM.as_raw())
}

#[cfg(not(unix))]
fn ended_by_term(_: std::process::ExitStatus) -> bool {
    true
}

impl Drop for Server {
    fn drop(&mut self) {
        // Where it has ended, neither does anything.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
