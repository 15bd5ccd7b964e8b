//! The process that took a function: whether it still runs decides whether somebody else may have the function.

use serde::{Deserialize, Serialize};

/// A process, known from a later one with the same number by when it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakerProcess {
    id: u32,
    /// In the kernel's ticks since the machine started. A program that takes the place of another one in the same process
    /// (`execve`) has the same.
    began: u64,
}

impl TakerProcess {
    /// The one that asks; `None` where the kernel shows no processes.
    pub fn this() -> Option<TakerProcess> {
        let id = std::process::id();
        Some(TakerProcess { id, began: beginning(id)? })
    }

    /// Whether it runs still.
    pub fn is_running(&self) -> bool {
        beginning(self.id) == Some(self.began)
    }
}

/// When a process began; `None` when there is none, or it has ended and its parent has not asked yet.
fn beginning(id: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // Behind the name, which may have anything in it: the state, and the 19th field after that (proc(5)).
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_runs_until_it_ends() {
        let this = TakerProcess::this().unwrap();
        assert!(this.is_running());
        let later = TakerProcess { began: this.began + 1, ..this };
        assert!(!later.is_running(), "another one with its number");
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let began = beginning(child.id()).unwrap();
        let process = TakerProcess { id: child.id(), began };
        assert!(process.is_running());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_running());
    }
}
