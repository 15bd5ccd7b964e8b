//! What a borrowed drive has, through an accelerator: `rackbus accel run … --drive DRIVE`.

use std::io::Write;
use std::time::{Duration, Instant};

use rackbus_driver::accel::{AccelError, DriveRange, DriveSource, MessageWork, SourceError};
use rackbus_driver::{DriveError, FunctionPlace};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_fabric::text::format_size;
use rackbus_spec::accel::Operation;
use serde_json::{Value, json};

use super::{borrowed, hex, not_set_up, place_of};
use crate::Common;
use crate::commands::accel::failed;
use crate::output::{Failure, Output};
use crate::size::parse as size;

/// Descriptors under way: two for each message.
const DEPTH: u16 = 8;

/// Which data of a drive.
#[derive(Debug, clap::Args)]
pub struct DriveArgs {
    /// The drive whose data are the messages, instead of standard input: the lease by which this host has borrowed it, or,
    /// in a VM, its PCI address: 02:00.0. There it is bound as the accelerator is.
    #[arg(long, value_name = "LEASE|ADDRESS", value_parser = drive_name)]
    drive: Option<DriveName>,
    /// Where on the drive they begin.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "0", requires = "drive")]
    from: u64,
    /// How much of the drive; without it, up to its end.
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "drive")]
    length: Option<u64>,
    /// Bytes of each message: whole blocks of the drive, 1 MiB at most. Without it, as much, or half of that where more may
    /// come out than goes in.
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "drive")]
    message: Option<u64>,
}

/// What a user calls a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
enum DriveName {
    Lease(u64),
    /// A PCI address of this machine.
    Address(String),
}

/// Reads the name of a drive.
fn drive_name(text: &str) -> Result<DriveName, String> {
    match (text.parse(), FunctionPlace::named(text)) {
        (Ok(lease), _) => Ok(DriveName::Lease(lease)),
        (_, FunctionPlace::Machine(address)) => Ok(DriveName::Address(address)),
        _ => Err("it is the number of a lease, or a PCI address such as 02:00.0".to_owned()),
    }
}

/// A drive, and what of it is sent.
pub struct DriveInput {
    place: FunctionPlace,
    from: u64,
    length: Option<u64>,
    message: Option<u64>,
}

impl DriveArgs {
    /// The drive that is meant, if one is.
    pub async fn source(&self, common: &Common) -> Result<Option<DriveInput>, Failure> {
        let place = match &self.drive {
            None => return Ok(None),
            Some(DriveName::Lease(number)) => self.leased(*number, common).await?,
            Some(DriveName::Address(address)) => FunctionPlace::Machine(address.clone()),
        };
        let DriveArgs { from, length, message, .. } = *self;
        Ok(Some(DriveInput { place, from, length, message }))
    }

    /// Where this host has the drive of a lease.
    async fn leased(&self, number: u64, common: &Common) -> Result<FunctionPlace, Failure> {
        let lease = borrowed(common, DeviceCapability::Blocks, Some(number)).await?.pop();
        lease.map(place_of).ok_or_else(|| {
            let remedy =
                "borrow one: rackbus borrow HOST/DEVICE --for HOST; `rackbus leases` lists them";
            Failure::new(
                format!("lease {number} is none of a drive that can be opened here"),
                remedy,
            )
        })
    }
}

/// Whether what comes out of a drive's messages, one behind the other, can be read again: what has a nonce of its own or
/// no end that can be found cannot, and blocks are counted where the drive's bytes are.
fn is_readable(operations: &[Operation]) -> bool {
    use Operation::{Aes256Ctr, Aes256GcmOpen, Aes256GcmSeal, Deflate};
    let never = |it: &Operation| matches!(it, Aes256GcmSeal | Aes256GcmOpen | Deflate);
    !operations.iter().any(never) && !operations.iter().skip(1).any(|it| *it == Aes256Ctr)
}

impl super::Args {
    /// Sends what a drive has.
    pub(super) fn run_drive(
        &self,
        source: &DriveInput,
        place: &FunctionPlace,
        operations: &[Operation],
        output: &Output,
    ) -> Result<(), Failure> {
        if !is_readable(operations) {
            let error = "each message of a drive would need a nonce of its own, or an end that can be found";
            return Err(Failure::usage(
                error,
                "use another operation with --drive, such as zstd, lz4, sha256 or, as the first one, aes256ctr",
            ));
        }
        let nonce = match operations.contains(&Operation::Aes256Ctr) {
            true => super::counter(self.counter.as_deref())?,
            false => [0; 16],
        };
        let mut accel = super::open(place, DEPTH)?;
        let stages = self.stages(&mut accel, operations)?;
        let largest = accel.info().largest as usize;
        let message = match source.message {
            Some(message) => usize::try_from(message).unwrap_or(usize::MAX),
            None => DriveSource::usual_message(&accel, &stages),
        };
        let opened = DriveSource::open(&mut accel, &source.place, message.min(2 * largest));
        let mut drive = opened.map_err(refused)?;
        let info = drive.drive().info();
        let end = info.blocks.saturating_mul(info.block_size.into());
        let length = source.length.unwrap_or(end.saturating_sub(source.from));
        let work = MessageWork { stages: &stages, nonce, associated: 0 };
        let last = operations.last().copied().unwrap_or(Operation::Copy);
        let (mut listed, mut told) = (Vec::new(), Instant::now());
        let range = DriveRange { offset: source.from, length };
        let room = accel.data_size();
        let mut written = Ok(());
        let outcome = drive.run(&mut accel, room, &work, range, |at, result| {
            if told.elapsed() > Duration::from_secs(1) {
                told = Instant::now();
                let (done, all) = (format_size(at - source.from), format_size(length));
                output.progress(&format!("through the accelerator: {done} of {all}"));
            }
            match self.one(output, last, at, result, &mut listed) {
                Ok(()) => Ok(()),
                Err(cause) => {
                    written = Err(cause);
                    Err(SourceError::Ended)
                }
            }
        });
        written.map_err(|cause| Failure::new(format!("standard output: {cause}"), "try again"))?;
        outcome.map_err(refused)?;
        if output.is_json() {
            output.result(&listed, |_| {});
        }
        Ok(())
    }

    /// Shows what came of one message.
    fn one(
        &self,
        output: &Output,
        last: Operation,
        at: u64,
        result: &[u8],
        listed: &mut Vec<Value>,
    ) -> std::io::Result<()> {
        let text = self.text(last, result);
        if output.is_json() {
            listed.push(
                json!({ "offset": at, "bytes": result.len(), "text": text, "hex": hex(result) }),
            );
            return Ok(());
        }
        match text {
            // As sha256sum has it: the digest, and what it is of.
            Some(text) => {
                text.trim_end().lines().for_each(|line| output.line(&format!("{line}  {at}")))
            }
            None => {
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(result)?;
                stdout.flush()?;
            }
        }
        Ok(())
    }
}

fn refused(error: SourceError) -> Failure {
    match error {
        SourceError::Drive(DriveError::Machine(_))
        | SourceError::Accel(AccelError::Device(DriveError::Machine(_))) => not_set_up(&error),
        SourceError::Accel(error) => failed(error),
        SourceError::Request(_) => {
            Failure::usage(error.to_string(), "see `rackbus accel run --help`")
        }
        SourceError::Message { .. } => {
            Failure::new(error.to_string(), "correct the operation, or send other data")
        }
        SourceError::Drive(_) | SourceError::Read { .. } | SourceError::Ended => {
            Failure::new(error.to_string(), "see `rackbus leases`, and borrow the drive anew")
        }
    }
}
