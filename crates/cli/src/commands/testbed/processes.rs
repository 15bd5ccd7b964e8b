//! The processes of a testbed's machines: a node or the control plane is ended as a crash would, and started again.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::{CONTROL_MACHINE, PATIENCE, Testbed, done, failed, up_again};
use crate::output::{Failure, Output};
use crate::process;

/// Starts a host's node, or the control plane, and waits until it is there.
pub async fn start(dir: &Path, machine: &str, output: &Output) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (_, machine) = testbed.machine(machine)?;
    if machine.name == CONTROL_MACHINE {
        testbed.start_control(dir).await?;
    } else {
        testbed.start_node(dir, machine)?;
        // The control plane may not have noticed yet that the one before is gone.
        let run_dir = dir.join(&machine.name).join("run");
        let file = process::pid_file(&run_dir, Some(&machine.name));
        wait_holder(&file, |holder| holder.is_some())?;
        up_again(&testbed.client(dir), &[&machine.name]).await?;
    }
    done(output, &machine.name, "started");
    Ok(())
}

/// Ends a host's node, or the control plane, as a crash would; nobody holds its file any more then.
pub fn kill(dir: &Path, machine: &str, output: &Output) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (_, machine) = testbed.machine(machine)?;
    let run_dir = dir.join(&machine.name).join("run");
    let host = (machine.name != CONTROL_MACHINE).then_some(machine.name.as_str());
    let file = process::pid_file(&run_dir, host);
    // Who holds the file, not what is in it: that process may be gone, and its number another's.
    let pid = rackbus_link::presence::holder(&file);
    let what = host.map_or("the control plane".to_owned(), |host| format!("the node of {host}"));
    let pid = pid.ok_or_else(|| failed(format!("{what} does not run")))?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)
        .map_err(|error| failed(error.to_string()))?;
    // Who starts it again is to find nobody.
    wait_holder(&file, |holder| holder != Some(pid))?;
    done(output, &machine.name, "killed");
    Ok(())
}

/// Waits until this can be said of the process that holds its file.
fn wait_holder(file: &Path, is: impl Fn(Option<Pid>) -> bool) -> Result<(), Failure> {
    let begun = Instant::now();
    while !is(rackbus_link::presence::holder(file)) {
        if begun.elapsed() > PATIENCE {
            return Err(failed(format!("{} changes hands too late", file.display())));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
