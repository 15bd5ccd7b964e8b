//! The processes of a testbed's machines: a node or the control plane is ended as a crash would, and started again; all of
//! them are ended with the testbed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::{CONTROL_MACHINE, Machine, PATIENCE, Testbed, done, failed, namespace, up_again};
use crate::output::{Failure, Output};
use crate::{paths, process};

/// Starts a host's node, or the control plane, and waits until it is there.
pub async fn start(dir: &Path, machine: &str, output: &Output) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (_, machine) = testbed.machine(machine)?;
    if testbed.is_bare {
        let error = format!("the testbed is bare: it has started nothing on {}", machine.name);
        let remedy = format!("start it by `rackbus testbed on {} -- PROGRAM`", machine.name);
        return Err(Failure::new(error, remedy));
    }
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

/// The processes that are in a machine: in its network namespace, or in its IPC namespace and in another network, as
/// those that `rackbus on` has started there.
fn inside(rack: &str, machines: &[Machine]) -> impl Fn(i32) -> bool {
    let number = |path: PathBuf| std::fs::metadata(path).ok().map(|file| file.ino());
    let of = move |pid: i32, kind: &str| number(format!("/proc/{pid}/ns/{kind}").into());
    let network = |it: &Machine| number(Path::new("/run/netns").join(namespace(rack, &it.name)));
    let networks: Vec<u64> = machines.iter().filter_map(network).collect();
    // The number of a process that held a machine may be another's by now.
    let holds = |it: &&Machine| of(it.process, "net").is_some_and(|net| networks.contains(&net));
    let ipc: Vec<u64> =
        machines.iter().filter(holds).filter_map(|it| of(it.process, "ipc")).collect();
    move |pid| {
        of(pid, "net").is_some_and(|it| networks.contains(&it))
            || of(pid, "ipc").is_some_and(|it| ipc.contains(&it))
    }
}

/// Ends all processes of the machines, those that hold them last.
pub fn end_all(testbed: &Testbed, dir: &Path) {
    let marks: Vec<String> = testbed
        .machines
        .iter()
        .map(|it| format!("{}={}", paths::RUN_DIR, dir.join(&it.name).join("run").display()))
        .collect();
    let (own, inside) = (std::process::id(), inside(&testbed.rack, &testbed.machines));
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let marked = environment.split(|byte| *byte == 0);
        let marked = { marked }.any(|it| marks.iter().any(|mark| mark.as_bytes() == it));
        let holds = testbed.machines.iter().any(|machine| machine.process == pid);
        if let Some(pid) = Pid::from_raw(pid)
            .filter(|_| marked && !holds && pid.unsigned_abs() != own && inside(pid))
        {
            process::end(pid);
        }
    }
    for machine in &testbed.machines {
        if let Some(pid) = Pid::from_raw(machine.process).filter(|_| inside(machine.process)) {
            process::end(pid);
        }
    }
}
