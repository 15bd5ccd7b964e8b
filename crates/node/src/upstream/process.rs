//! The program that a node runs for the user of a function.
//!
//! It is known by its number, and not as what started it: a node that is restarted in place has the programs that it ran
//! before as its children still.

use std::io;
use std::process::Child;
use std::time::Instant;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, waitid, waitpid,
};

use super::{AGAIN, GRACE};

/// A program that runs in a process group of its own. Until it is [ended](ServerProcess::end) nobody waits for it, so that its
/// number, and its group's, is nobody else's.
#[derive(Debug)]
pub(super) struct ServerProcess(Pid);

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
        process.ended()?;
        Ok(process)
    }

    fn numbered(number: u32) -> io::Result<ServerProcess> {
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other(format!("{number} is no process")))?;
        Ok(ServerProcess(pid))
    }

    /// The number by which another program of this process [has it](ServerProcess::inherited).
    pub fn number(&self) -> u32 {
        self.0.as_raw_pid().unsigned_abs()
    }

    /// How it ended, for people; `None` while it runs.
    ///
    /// # Errors
    /// The system's.
    pub fn ended(&self) -> io::Result<Option<String>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.0), look)?;
        Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => format!("exit status {status}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "how is not known".to_owned(),
        }))
    }

    /// Kills it and what it started, without waiting.
    pub fn kill(&self) {
        // A group that is gone is no failure.
        let _ = kill_process_group(self.0, Signal::KILL);
    }

    /// Ends it and what it started, and waits until it is gone.
    pub fn end(self) {
        let _ = kill_process_group(self.0, Signal::TERM);
        let asked = Instant::now();
        while matches!(self.ended(), Ok(None)) && asked.elapsed() < GRACE {
            std::thread::sleep(AGAIN);
        }
        // Whatever the program left behind, and the program itself if it is still there.
        self.kill();
        let _ = waitpid(Some(self.0), WaitOptions::empty());
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
        let process = ServerProcess::inherited(number).unwrap();
        assert_eq!(process.ended().unwrap(), None);
        process.kill();
        let again = ServerProcess::inherited(number).unwrap();
        again.end();
        assert!(ServerProcess::inherited(number).is_err(), "it is waited for once");
        for number in [0, 1, u32::MAX] {
            assert!(ServerProcess::inherited(number).is_err(), "{number}");
        }
    }
}
