#![forbid(unsafe_code)]
//! What a fuzzer drives: one [`Target`] for each parser of a peer's, a guest's or a file's bytes.
//!
//! A target is a plain function of bytes. It drives the real code as a peer would, with messages
//! that the bytes choose, and panics when what must hold does not: the code itself panics, answers
//! what nobody asked, keeps what it must release, or reaches what it may not. The same bytes
//! always do the same. `tests/short.rs` runs each target on its seeds and some thousand mutations
//! of them; `make fuzz` runs them under libFuzzer, which looks for new ways through the code.
//!
//! * [`input`]: bytes as choices.
//! * [`vfio_user`], [`nvme`]: what a VM or a driver says, of which a drive sees the commands. [`nvme_medium`]: what the
//!   two halves of a drive say to each other.
//! * [`vfio_user_client`]: what a server answers to a vfio-user client, and to a borrower's node.
//! * [`accel`]: what a tenant says to an accelerator's engines. [`accel_function`]: what it does to its function, and
//!   what the two halves of one say to each other. [`nic`]: what a driver does to a network function. [`nic_medium`],
//!   [`memory_medium`]: what the halves of functions between machines say to each other.
//! * [`state`]: saved functions that another process goes on with.
//! * [`link`], [`exchange`], [`packets`], [`network`], [`segment`]: what other nodes and processes say. [`arenas`]: what
//!   they store through an NTB.
//! * [`window`]: what a borrower's kernel module stores for a function that is lent through an NTB, and what its lender says.
//! * [`guest`]: what a guest's kernel says to the device that it shares memory through. [`agent`]: what a guest answers to
//!   commands.
//! * [`files`]: rack files, timing and workloads.
//! * [`api`]: the control plane's HTTP API.

pub mod accel;
pub mod accel_function;
pub mod agent;
pub mod api;
pub mod arenas;
mod clock;
pub mod exchange;
pub mod files;
pub mod guest;
pub mod input;
pub mod link;
pub mod memory_medium;
pub mod network;
pub mod nic;
pub mod nic_medium;
pub mod nvme;
pub mod nvme_medium;
pub mod packets;
pub mod segment;
pub mod state;
pub mod vfio_user;
pub mod vfio_user_client;
pub mod window;

/// One thing to fuzz.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, for the command line and for files.
    pub name: &'static str,
    /// Runs one input; panics when something is wrong.
    pub run: fn(&[u8]),
    /// Inputs to begin with: what well-behaved peers say.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that inputs have in them, for mutations.
    pub words: &'static [&'static str],
}

/// All targets, in the order in which they run.
pub const TARGETS: &[Target] = &[
    Target { name: "vfio-user", run: vfio_user::run, seeds: vfio_user::seeds, words: &[] },
    Target {
        name: "vfio-user-client",
        run: vfio_user_client::run,
        seeds: vfio_user_client::seeds,
        words: &[],
    },
    Target { name: "nvme", run: nvme::run, seeds: nvme::seeds, words: &[] },
    Target { name: "nvme-medium", run: nvme_medium::run, seeds: nvme_medium::seeds, words: &[] },
    Target { name: "accel", run: accel::run, seeds: accel::seeds, words: &[] },
    Target {
        name: "accel-function",
        run: accel_function::run,
        seeds: accel_function::seeds,
        words: &[],
    },
    Target {
        name: "accel-state",
        run: accel_function::restore,
        seeds: accel_function::states,
        words: accel_function::WORDS,
    },
    Target { name: "nic", run: nic::run, seeds: nic::seeds, words: &[] },
    Target { name: "nic-state", run: nic::restore, seeds: nic::states, words: nic::WORDS },
    Target { name: "nic-medium", run: nic_medium::run, seeds: nic_medium::seeds, words: &[] },
    Target {
        name: "memory-medium",
        run: memory_medium::run,
        seeds: memory_medium::seeds,
        words: &[],
    },
    Target { name: "network", run: network::run, seeds: network::seeds, words: network::WORDS },
    Target { name: "state", run: state::run, seeds: state::seeds, words: state::WORDS },
    Target { name: "link", run: link::run, seeds: link::seeds, words: link::WORDS },
    Target { name: "arenas", run: arenas::run, seeds: arenas::seeds, words: &[] },
    Target { name: "window", run: window::run, seeds: window::seeds, words: window::WORDS },
    Target { name: "exchange", run: exchange::run, seeds: exchange::seeds, words: &[] },
    Target { name: "packets", run: packets::run, seeds: packets::seeds, words: &[] },
    Target { name: "segment", run: segment::run, seeds: segment::seeds, words: &[] },
    Target { name: "guest", run: guest::run, seeds: guest::seeds, words: &[] },
    Target { name: "agent", run: agent::run, seeds: agent::seeds, words: agent::WORDS },
    Target { name: "rack", run: files::rack, seeds: files::rack_seeds, words: files::WORDS },
    Target { name: "model", run: files::model, seeds: files::model_seeds, words: files::WORDS },
    Target { name: "tools", run: files::tools, seeds: files::tools_seeds, words: &[] },
    Target { name: "api", run: api::run, seeds: api::seeds, words: api::WORDS },
];

/// The target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
