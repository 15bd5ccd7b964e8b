//! One file per command: its arguments, and what it does.

pub mod accel;
pub mod bench;
pub mod borrow;
pub mod capability;
pub mod certificates;
pub mod completions;
pub mod composition;
pub mod context;
pub mod control;
pub mod devices;
pub mod down;
pub mod events;
pub mod give_back;
pub mod guest;
pub mod leases;
pub mod lend;
pub mod login;
pub mod mem;
pub mod metal;
pub mod metrics;
pub mod model;
pub mod net;
pub mod node;
pub mod node_id;
pub mod ntb;
pub mod offer;
pub mod offers;
pub mod on;
pub mod path;
pub mod reach;
pub mod restart;
pub mod revoke;
pub mod share;
pub mod status;
pub mod testbed;
pub mod token;
pub mod top;
pub mod up;
pub mod vm;
pub mod whoami;
pub mod withdraw;

use std::path::{Path, PathBuf};

use rackbus_control::ControlClient;
use rackbus_devices::RackDevice;
use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::{Host, Rack};
use rackbus_fabric::text::FileError;

use crate::output::Failure;
use crate::paths::{find_run_dir, running};
use crate::{Common, contexts};

/// A client of the control plane of the rack that is meant: that of a context, or of this machine.
pub async fn client(common: &Common) -> Result<ControlClient, Failure> {
    match contexts::chosen(common)? {
        Some(context) => context.client().await,
        None => Ok(ControlClient::new(&rackbus_node::control_socket(&find_run_dir(common)?))),
    }
}

/// Reads a rack file.
pub fn read_rack(file: &Path) -> Result<Rack, Failure> {
    read_devices(file).map(|(rack, _)| rack)
}

/// Reads a rack file, and what its devices are.
pub fn read_devices(file: &Path) -> Result<(Rack, Vec<RackDevice>), Failure> {
    let name = file.display().to_string();
    parse_rack(&name, &read_text(file)?).map_err(misread)
}

/// Reads a rack file's text.
pub fn read_text(file: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(file).map_err(|cause| {
        Failure::usage(
            format!("{}: {cause}", file.display()),
            "name a rack file, for example examples/demo/rack.toml",
        )
    })
}

/// A file's error: its place and cause, and what is allowed.
pub fn misread(error: FileError) -> Failure {
    let place = format!("{}:{}:{}", error.file, error.line, error.column);
    Failure::usage(format!("{place}: {}", error.what), error.allowed)
}

/// Whose description a command reads.
#[derive(Debug, clap::Args)]
pub struct DescriptionSource {
    /// A rack file, instead of that of the rack that runs on this machine.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

impl DescriptionSource {
    /// Reads the file that is meant: the one named, or that of the running rack.
    pub fn read(&self, common: &Common) -> Result<Rack, Failure> {
        match &self.file {
            Some(file) => read_rack(file),
            None => running(&find_run_dir(common)?)?.rack(),
        }
    }
}

/// The host that the user names.
pub fn named_host<'r>(rack: &'r Rack, name: &str) -> Result<&'r Host, Failure> {
    rack.host(name).ok_or_else(|| {
        let names: Vec<&str> = rack.hosts.iter().map(|host| host.name.as_str()).collect();
        let error = format!("rack {} has no host {name}", rack.name);
        Failure::usage(error, format!("its hosts are {}", names.join(", ")))
    })
}
