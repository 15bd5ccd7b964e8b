//! `rackbus on`: runs a program as if on a host.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use rackbus_netdev::namespace;
use rackbus_node::network::namespace_of;

use crate::Common;
use crate::commands::named_host;
use crate::output::Failure;
use crate::paths;

/// The variable that tells programs their host.
const HOST: &str = "RACKBUS_HOST";

/// What SISCI programs are linked with.
const LIBRARY: &str = "libsisci.so";

/// Run a program as if on a host: what it attaches to is that host's node.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus on beta -- ./receiver -rn 4
  rackbus on alpha -- bash          a shell whose programs are on alpha
  rackbus on beta -- iperf3 -s      after `rackbus net up`: with beta's interface

The program gets RACKBUS_RUN_DIR and RACKBUS_HOST, and finds libsisci.so. Where the host has its interface, the
program is in the network namespace of that.")]
pub struct Args {
    /// The host on which the program is to run.
    host: String,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl Args {
    /// Becomes the program; returns only when that cannot be.
    pub fn run(&self, common: &Common) -> Result<(), Failure> {
        let run_dir = paths::find_run_dir(common)?;
        let rack = paths::running(&run_dir)?.rack()?;
        named_host(&rack, &self.host)?;
        let run_dir = std::path::absolute(&run_dir).unwrap_or(run_dir);
        let [program, arguments @ ..] = self.command.as_slice() else {
            return Err(Failure::usage("no program is named", "name one after `--`"));
        };
        let mut command = std::process::Command::new(program);
        command.args(arguments).env(paths::RUN_DIR, run_dir).env(HOST, &self.host);
        if let Some(folder) = library_folder() {
            command.env("LD_LIBRARY_PATH", in_front(&folder));
        }
        join_network(&rack.name, &self.host)?;
        let cause = command.exec();
        let error = format!("{}: {cause}", program.display());
        Err(Failure::new(error, "name a program that can be run"))
    }
}

/// Goes into the host's network namespace, if it has one.
fn join_network(rack: &str, host: &str) -> Result<(), Failure> {
    let name = namespace_of(rack, host);
    let failed = |cause: std::io::Error| {
        let error = format!("the network namespace {name} cannot be entered: {cause}");
        Failure::new(error, "run as root, or take the network down with `rackbus net down`")
    };
    match namespace::open(&name) {
        Ok(namespace) => namespace::enter(&namespace).map_err(failed),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Where `libsisci.so` is: beside this program, as after a build, or where it is installed.
fn library_folder() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let beside = program.parent()?;
    let installed = beside.parent().unwrap_or(Path::new("/"));
    let folders = [beside.to_owned(), installed.join("lib64"), installed.join("lib")];
    folders.into_iter().find(|folder| folder.join(LIBRARY).exists())
}

/// `LD_LIBRARY_PATH` with that folder before what it has.
fn in_front(folder: &Path) -> OsString {
    let mut path = folder.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|it| !it.is_empty()) {
        path.push(":");
        path.push(others);
    }
    path
}
