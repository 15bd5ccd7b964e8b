//! A program on a host that runs beside what a scenario does. It has a limit, and does not outlive the scenario.

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_e2e::{Result, ensure};

use crate::segments::LIMIT;

/// How often to look whether it has ended.
const PAUSE: Duration = Duration::from_millis(2);

/// The program. It is killed when this is dropped.
pub struct HostProgram {
    child: Child,
    /// What it prints, and what it says of errors: files, which hold as much as it likes while nobody reads.
    printed: File,
    said: File,
}

impl HostProgram {
    /// Starts `command` with its output in files.
    ///
    /// # Errors
    /// When that fails.
    pub fn start(mut command: Command) -> Result<HostProgram> {
        let [printed, said] = [memory_file()?, memory_file()?];
        command.stdin(Stdio::null()).stdout(printed.try_clone()?).stderr(said.try_clone()?);
        Ok(HostProgram { child: command.spawn()?, printed, said })
    }

    /// What it printed, once it has ended well.
    ///
    /// # Errors
    /// When it failed, or has not ended in time: with what it said.
    pub fn end(mut self) -> Result<String> {
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait()? {
                Some(status) => break status,
                None => ensure!(
                    begun.elapsed() < LIMIT,
                    "a program of this machine goes on after {LIMIT:?}: {}",
                    read(&mut self.said)?
                ),
            }
            std::thread::sleep(PAUSE);
        };
        ensure!(status.success(), "a program of this machine: {status}: {}", read(&mut self.said)?);
        read(&mut self.printed)
    }
}

impl Drop for HostProgram {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn memory_file() -> Result<File> {
    Ok(rustix::fs::memfd_create("printed", rustix::fs::MemfdFlags::CLOEXEC)?.into())
}

/// All that a file has.
fn read(file: &mut File) -> Result<String> {
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
