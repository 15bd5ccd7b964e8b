//! One file per command: its arguments, and what it does.

pub mod bench;
pub mod borrow;
pub mod completions;
pub mod control;
pub mod devices;
pub mod down;
pub mod give_back;
pub mod leases;
pub mod model;
pub mod node;
pub mod path;
pub mod status;
pub mod up;
pub mod vm;

use rackbus_control::Client;

use crate::Common;
use crate::output::Failure;
use crate::paths::find_run_dir;

/// A client of the control plane of the rack that is meant.
pub fn client(common: &Common) -> Result<Client, Failure> {
    Ok(Client::new(&rackbus_node::control_socket(&find_run_dir(common)?)))
}

/// Reads a rack file.
pub fn read_rack(file: &std::path::Path) -> Result<rackbus_fabric::rack::Rack, Failure> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|cause| {
        Failure::usage(
            format!("{name}: {cause}"),
            "name a rack file, for example examples/demo/rack.toml",
        )
    })?;
    rackbus_fabric::rack::Rack::parse(&name, &text).map_err(|error| {
        let place = format!("{}:{}:{}", error.file, error.line, error.column);
        Failure::usage(format!("{place}: {}", error.what), error.allowed)
    })
}

/// Log lines on stderr, as much as `RACKBUS_LOG` asks for.
pub fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("RACKBUS_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
}
