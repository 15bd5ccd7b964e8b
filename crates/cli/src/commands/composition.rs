//! `rackbus composition`: functions that a host borrows together.

use std::time::Duration;

use rackbus_control::api::Isolation;
use rackbus_control::compositions::{
    Composition, CompositionRequest, CompositionSpec, CompositionState,
};

use crate::Common;
use crate::commands::borrow::IsolationName;
use crate::commands::client;
use crate::output::{Cell, Failure, Output, Tone};

/// Borrow several functions at once: all of them or none. A composition is written in the rack file
/// (`[[composition]]`) or saved here. Its functions reach each other's memory by DMA, as those of a
/// group do.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus composition save db --for beta alpha/nvme0 gamma/nvme0 gamma/ram0
  rackbus composition borrow db                    all three, or none
  rackbus composition borrow db --wait=10min       as soon as others have returned what they have of it
  rackbus composition borrow db --vm web           plugged into beta's running VM web, all three or none
  rackbus vm run --host beta --composition db      for a VM; it is returned when the VM ends
  rackbus composition return db
  rackbus composition list --json | jq '.[].state'")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the compositions, and what of them is borrowed
    List,
    /// Save a composition under a name
    Save(SaveArgs),
    /// Forget a composition that was saved
    Remove(NameArgs),
    /// Borrow all of a composition's functions, or none
    Borrow(BorrowArgs),
    /// Return all that is borrowed of a composition
    Return(NameArgs),
}

/// Arguments of `rackbus composition save`.
#[derive(Debug, clap::Args)]
struct SaveArgs {
    /// What to call the composition
    name: String,
    /// The host that shall have its functions
    #[arg(long = "for", value_name = "HOST")]
    host: String,
    /// Its functions, as HOST/DEVICE
    #[arg(required = true, value_name = "FUNCTION")]
    functions: Vec<String>,
    /// `strict`: the lenders get no memory of the borrower's
    #[arg(long, value_enum, default_value_t = IsolationName::Shared, value_name = "HOW")]
    isolation: IsolationName,
}

/// `rackbus composition remove` and `rackbus composition return`.
#[derive(Debug, clap::Args)]
struct NameArgs {
    /// The composition, by the name that it was saved with
    name: String,
}

/// Arguments of `rackbus composition borrow`.
#[derive(Debug, clap::Args)]
struct BorrowArgs {
    /// The composition, by the name that it was saved with
    name: String,
    /// Wait so long while others have some of it; without a time, a day. What waits has none of it
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "1day",
        value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
    /// Of those who wait, the greatest priority comes first, from 0 to 255
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    priority: u8,
    /// The running VM of its host that its functions are plugged into
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common).await?;
        match &self.command {
            Command::List => {
                let compositions = client.compositions().await?;
                let head = ["composition", "for", "state", "functions"];
                output.result(&compositions, |o| o.table(&head, rows(&compositions)));
            }
            Command::Save(args) => {
                let spec = CompositionSpec {
                    name: args.name.clone(),
                    borrower: args.host.clone(),
                    functions: args.functions.clone(),
                    isolation: Isolation::from(args.isolation),
                };
                let saved = client.save_composition(&spec).await?;
                output.result(&saved, |o| {
                    let functions = saved.functions.join(", ");
                    o.line(&format!("{}: {functions} for {}", saved.name, saved.borrower));
                });
            }
            Command::Remove(args) => {
                let removed = client.remove_composition(&args.name).await?;
                output.result(&removed, |o| o.line(&format!("{} is removed", removed.name)));
            }
            Command::Borrow(args) => {
                let wait_ms = args.wait.map(|it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX));
                let request = CompositionRequest {
                    wait_ms,
                    priority: args.priority,
                    vm: args.vm.clone(),
                    starter: None,
                };
                let borrowed = client.borrow_composition(&args.name, &request).await?;
                output.result(&borrowed, |o| {
                    for lease in &borrowed.leases {
                        let socket = lease.socket.as_deref().unwrap_or_default();
                        o.line(&format!("lease {}: {} {socket}", lease.lease, lease.function));
                    }
                });
            }
            Command::Return(args) => {
                let before = client.return_composition(&args.name).await?;
                output.result(&before, |o| o.line(&format!("{} is returned", before.name)));
            }
        }
        Ok(())
    }
}

fn rows(compositions: &[Composition]) -> Vec<Vec<Cell>> {
    let row = |composition: &Composition| {
        let (state, tone) = match composition.state {
            CompositionState::Free => ("free", Tone::Plain),
            CompositionState::Borrowed => ("borrowed", Tone::Good),
            CompositionState::Partly => ("partly", Tone::Bad),
        };
        let mut away = composition.leases.iter().map(|it| &it.borrower);
        let state = match away.find(|host| **host != composition.borrower) {
            Some(host) => format!("{state} by {host}"),
            None => state.to_owned(),
        };
        vec![
            composition.name.clone().into(),
            composition.borrower.clone().into(),
            Cell(state, tone),
            composition.functions.join(" ").into(),
        ]
    };
    compositions.iter().map(row).collect()
}
