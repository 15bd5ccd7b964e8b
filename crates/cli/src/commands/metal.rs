//! `rackbus metal`: functions of one physical host in another one's own PCI tree, through an NTB.

use std::time::Duration;

use rackbus_memory::Lending;
use rackbus_metal::borrower::{self, BorrowedState, Module, ModuleStatus, WantedFunction};
use rackbus_metal::{LentWindow, MetalError};
use rackbus_vfio::{Bindings, PciAddress, Sysfs, TakenFunction, VfioError};
use serde_json::json;

use crate::output::{Cell, Failure, Output, Tone};
use crate::{log, process};

/// Lend a device to the host at the other end of a non-transparent bridge (NTB), and borrow one from there: it appears
/// in the borrower's own PCI tree, and the kernel's own driver binds to it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus metal lend 0000:03:00.0 --ntb 0000:05:00.0         at the lender, until Ctrl-C
  rackbus metal borrow alpha/nvme0 --ntb 0000:05:00.0 --offset 0x0 --epoch 1
                                                             at the borrower, with what the lender printed
  rackbus metal list                                         what is borrowed, and how it is
  rackbus metal return 1                                     its driver releases it, and it is gone
  rackbus metal reopen 0000:05:00.0                          at the borrower, when the module has closed its NTB

The borrower needs the kernel module rackbus (see the book), the lender an IOMMU.
Exit codes: 0 done, 1 refused or failed, 2 wrong usage.")]
pub struct Args {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Lend a PCI function of this machine through an NTB, until this ends.
    Lend {
        /// The function, as `lspci -D` shows it.
        #[arg(value_parser = address)]
        device: PciAddress,
        /// PCI address of the NTB through which it is lent.
        #[arg(long, value_parser = address)]
        ntb: PciAddress,
        /// The epoch of the lease: higher than that of any lease of this NTB before.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
        epoch: u64,
        /// Take the function although a file system of it is mounted or its network is up.
        #[arg(long)]
        force: bool,
    },
    /// Make a function that is lent at the other end of an NTB appear in this host.
    Borrow {
        /// Its name, for the kernel's messages.
        name: String,
        /// The NTB, which is then bound to the kernel module.
        #[arg(long, value_parser = address)]
        ntb: PciAddress,
        /// Where it is in the NTB's window, as the lender says.
        #[arg(long, value_parser = number)]
        offset: u64,
        /// The epoch of the lease, as the lender says.
        #[arg(long)]
        epoch: u64,
        /// Interrupts that it may have; without it, 8.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=32))]
        vectors: Option<u32>,
    },
    /// Return a borrowed function: its driver releases it, and it disappears.
    Return {
        /// Its handle, as `rackbus metal list` shows it.
        handle: u32,
        /// Return it although file systems of it are mounted.
        #[arg(long)]
        force: bool,
        /// Seconds that its driver may take.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
        timeout: u64,
    },
    /// List what is borrowed, and how it is.
    List,
    /// Open an NTB that this host's kernel module has closed, as a lender did not say that a device of its reaches memory no
    /// more: what the host at its other end reaches of this one, it reaches again.
    Reopen {
        /// PCI address of this host's end of the NTB.
        #[arg(value_parser = address)]
        ntb: PciAddress,
    },
}

fn address(text: &str) -> Result<PciAddress, String> {
    text.parse().map_err(|error: VfioError| error.to_string())
}

fn number(text: &str) -> Result<u64, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|error| error.to_string())
}

/// What errors say, as a failure and what to do.
fn failure(error: impl Into<MetalError>) -> Failure {
    let error = error.into();
    let text = error.to_string();
    match (&error, text.split_once("; ")) {
        (MetalError::Vfio(_), Some((error, remedy))) => Failure::new(error, remedy),
        (MetalError::NoModule(_) | MetalError::Version(_), _) => {
            Failure::new(text, "see the chapter on the kernel module in the book")
        }
        _ => Failure::new(text, "see `rackbus metal --help`"),
    }
}

impl Args {
    pub async fn run(&self, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Action::Lend { device, ntb, epoch, force } => {
                lend(*device, *ntb, *epoch, *force, output).await
            }
            Action::Borrow { name, ntb, offset, epoch, vectors } => {
                let (name, offset, epoch) = (name.clone(), *offset, *epoch);
                borrow(
                    &WantedFunction { ntb: *ntb, offset, epoch, name, vectors: *vectors },
                    output,
                )
            }
            Action::Return { handle, force, timeout } => {
                let module = Module::open().map_err(failure)?;
                let limit = Duration::from_secs(*timeout);
                module.give_back(*handle, *force, limit).map_err(failure)?;
                output.result(&json!({ "returned": handle }), |o| o.line("returned"));
                Ok(())
            }
            Action::List => list(output),
            Action::Reopen { ntb } => {
                let reopened = Module::open()
                    .and_then(|module| borrower::reopen(&Sysfs::here(), &module, *ntb));
                reopened.map_err(failure)?;
                output.result(&json!({ "reopened": ntb.to_string() }), |o| o.line("reopened"));
                Ok(())
            }
        }
    }
}

/// Takes the function and the NTB from their drivers, and lends the one through the other.
async fn lend(
    device: PciAddress,
    ntb: PciAddress,
    epoch: u64,
    force: bool,
    output: &Output,
) -> Result<(), Failure> {
    log::start(None);
    let mut end = process::EndRequests::listen();
    let bindings = Bindings::here();
    bindings.load_driver();
    let mut taken = Vec::new();
    let lent = take_and_lend(&bindings, (device, ntb), epoch, force, &mut taken);
    let lent = lent.inspect_err(|_| undo(&bindings, taken))?;
    let status = lent.1.status();
    output.result(&status, |o| {
        o.line(&format!("ready: {device} at offset {:#x}, epoch {epoch}", status.offset));
        o.line(&format!(
            "at the borrower: rackbus metal borrow NAME --ntb NTB --offset {:#x} --epoch {epoch}",
            status.offset
        ));
        o.line(
            "through the window the device reaches all of the borrower's memory, if that host has no IOMMU in between",
        );
    });
    end.wait().await;
    // The function is taken away before its driver gets it back.
    drop(lent);
    let given = [device, ntb].map(|address| bindings.give_back(address).map(drop));
    given.into_iter().collect::<Result<(), _>>().map_err(failure)
}

/// Gives back what was taken for a lending that failed, the last first, and leaves alone what others had taken. Why that
/// failed is told; what goes wrong here is logged.
fn undo(bindings: &Bindings, taken: Vec<TakenFunction>) {
    for function in taken.into_iter().rev() {
        if let Err(error) = bindings.undo(function) {
            tracing::error!(%error, "it is not given back; rackbus lend --return does it");
        }
    }
}

/// Who takes functions here, as the notes have it: each process by itself, as another one may lend at the same time.
fn taker() -> String {
    format!("rackbus metal lend, process {}", std::process::id())
}

/// What is taken is added to `taken`, also when it is not lent then.
fn take_and_lend(
    bindings: &Bindings,
    (device, ntb): (PciAddress, PciAddress),
    epoch: u64,
    force: bool,
    taken: &mut Vec<TakenFunction>,
) -> Result<(LentWindow, rackbus_metal::WindowLoan), Failure> {
    let taker = taker();
    for (address, force) in [(ntb, false), (device, force)] {
        taken.push(bindings.take(address, &taker, force).map_err(failure)?);
    }
    let facts = |address| bindings.sysfs().facts(address).map_err(failure);
    let window = LentWindow::open(facts(ntb)?).map_err(failure)?;
    let lost = Box::new(|reason: &str| tracing::error!(reason, "the borrower lost it"));
    // There is no rack whose file could bound it.
    let lending = Lending::alone();
    let lent = window.lend(facts(device)?, &lending, epoch, lost).map_err(failure)?;
    Ok((window, lent))
}

fn borrow(wanted: &WantedFunction, output: &Output) -> Result<(), Failure> {
    borrower::bind(&Sysfs::here(), wanted.ntb).map_err(failure)?;
    let borrowed = Module::open().and_then(|module| module.borrow(wanted)).map_err(failure)?;
    output.result(&borrowed, |o| {
        o.line(&format!(
            "{} is {:x}:00:00.0, handle {}",
            wanted.name, borrowed.domain, borrowed.handle
        ));
    });
    Ok(())
}

fn list(output: &Output) -> Result<(), Failure> {
    let module = Module::open().map_err(failure)?;
    let mut all: Vec<ModuleStatus> = Vec::new();
    for handle in module.handles().map_err(failure)? {
        // One that was returned meanwhile is not listed.
        all.extend(module.status(handle).ok());
    }
    output.result(&all, |o| {
        let rows = all.iter().map(|it| {
            let (word, tone) = match it.state {
                BorrowedState::Borrowed => ("borrowed", Tone::Good),
                BorrowedState::Returning => ("returning", Tone::Busy),
                BorrowedState::Losing => ("being lost", Tone::Bad),
                BorrowedState::Lost => ("lost", Tone::Bad),
                BorrowedState::Returned => ("returned late", Tone::Bad),
                BorrowedState::Unknown => ("?", Tone::Bad),
            };
            let word = match it.reason {
                Some(reason) => format!("{word}: {reason}"),
                None => word.to_owned(),
            };
            vec![
                it.handle.to_string().into(),
                it.name.clone().into(),
                format!("{:x}:00:00.0", it.domain).into(),
                it.ntb.to_string().into(),
                it.interrupts.iter().sum::<u64>().to_string().into(),
                it.dma_refused.to_string().into(),
                Cell(word, tone),
            ]
        });
        let head = ["handle", "name", "function", "ntb", "interrupts", "refused dma", "state"];
        o.table(&head, rows.collect());
    });
    Ok(())
}
