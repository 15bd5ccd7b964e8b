//! The program that a node runs for the user of a function.
//!
//! It is known by its number, and not as what started it: a node that is restarted in place has the programs that it ran
//! before as its children still.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::Instant;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, waitid, waitpid,
};

use super::{AGAIN, GRACE};

/// A program that runs in a process group of its own.
#[derive(Debug)]
pub(super) struct ServerProcess {
    pid: Pid,
    /// How it ended, once that is known: its number may be another one's from then on.
    ended: Option<ExitStatus>,
}

impl ServerProcess {
    /// A program that was just run.
    ///
    /// # Errors
    /// Its number is none, which no system says.
    pub fn of(child: &Child) -> io::Result<ServerProcess> {
        ServerProcess::numbered(child.id())
    }

    /// One that this process ran before it became another program.
    ///
    /// # Errors
    /// It is no child of this process.
    pub fn inherited(number: u32) -> io::Result<ServerProcess> {
        let process = ServerProcess::numbered(number)?;
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(process.pid), look)?;
        Ok(process)
    }

    fn numbered(number: u32) -> io::Result<ServerProcess> {
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other(format!("{number} is no process")))?;
        Ok(ServerProcess { pid, ended: None })
    }

    /// The number by which another program of this process [has it](ServerProcess::inherited).
    pub fn number(&self) -> u32 {
        self.pid.as_raw_pid().unsigned_abs()
    }

    /// How it ended; `None` while it runs.
    ///
    /// # Errors
    /// The system's.
    pub fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let ended = waitpid(Some(self.pid), WaitOptions::NOHANG)?;
            self.ended = ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
        }
        Ok(self.ended)
    }

    /// Kills it and what it started, without waiting.
    pub fn kill(&self) {
        // A group that is gone is no failure.
        let _ = kill_process_group(self.pid, Signal::KILL);
    }

    /// Ends it and what it started, and waits until it is gone.
    pub fn end(mut self) {
        let _ = kill_process_group(self.pid, Signal::TERM);
        let asked = Instant::now();
        while matches!(self.status(), Ok(None)) && asked.elapsed() < GRACE {
            std::thread::sleep(AGAIN);
        }
        // Whatever the program left behind, and the program itself if it is still there.
        self.kill();
        if self.ended.is_none() {
            let _ = waitpid(Some(self.pid), WaitOptions::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_is_known_by_its_number_until_it_has_ended() {
        let child = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        let number = ServerProcess::of(&child).unwrap().number();
        drop(child);
        let mut process = ServerProcess::inherited(number).unwrap();
        assert_eq!(process.status().unwrap(), None);
        process.kill();
        let again = ServerProcess::inherited(number).unwrap();
        again.end();
        assert!(ServerProcess::inherited(number).is_err(), "it is waited for once");
        for number in [0, 1, u32::MAX] {
            assert!(ServerProcess::inherited(number).is_err(), "{number}");
        }
    }
}
