//! `rackbus accel run`: one message through an accelerator, or what a borrowed drive has.

mod drive;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_control::api::{Lease, Placement};
use rackbus_driver::FunctionPlace;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_spec::accel::Operation;
use serde_json::json;

use super::failed;
use crate::Common;
use crate::commands::{capability, client};
use crate::output::{Failure, Output};

/// Send a message from standard input through an accelerator that was borrowed, and write what comes
/// out to standard output. With `--drive`, the messages are what a borrowed drive has: it reads into memory that the
/// accelerator takes them from, and the command only tells both, and takes results.
///
/// In a VM the accelerator is a PCI function of that machine; it is bound to vfio-pci, or to no driver (the
/// book says how, in "Renting accelerators"). So it is on a host that has borrowed it through an NTB, for root and bound to
/// no driver.
///
/// OPERATION is one, or several with `+` between them, which are done one after the other in the
/// accelerator: `zstd+aes256gcm`. aes256gcm puts the nonce that it draws before its output, and
/// aes256gcm-open takes it from there.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus borrow alpha/accel0.vf1 --for beta
  head -c 32 /dev/urandom >key
  rackbus accel run aes256gcm --key key <in >out
  rackbus accel run aes256gcm-open --key key <out
  rackbus accel run zstd+aes256gcm --key key <in >small
  rackbus accel run sha256 <in
  rackbus accel run regex --patterns words.txt <in      pattern and place of each match
  rackbus accel run sha256 --device 01:00.0 <in         in a VM that has several
  rackbus accel run crc32c --drive 2                    a checksum of each MiB of a drive
  rackbus accel run crc32c --drive 02:00.0              in a VM
  rackbus accel run zstd --drive 2 --from '1 GiB' --length '64 MiB' >part.zst")]
pub struct Args {
    /// The operation, `aes256gcm`, or several joined by `+`; one that there is not is answered with those there are.
    #[arg(value_name = "OPERATION")]
    operations: String,
    /// The lease of the accelerator; without it, the only one there is.
    #[arg(long, value_name = "LEASE", group = "which")]
    lease: Option<u64>,
    /// The vfio-user socket of the accelerator, instead of a lease.
    #[arg(long, value_name = "PATH", group = "which")]
    socket: Option<PathBuf>,
    /// The PCI address of an accelerator that this machine has, in a VM or through an NTB: 01:00.0.
    #[arg(long, value_name = "ADDRESS", group = "which")]
    device: Option<String>,
    /// A file with the key: 32 bytes.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// A file with regular expressions, one a line.
    #[arg(long, value_name = "FILE")]
    patterns: Option<PathBuf>,
    /// The first counter block of aes256ctr: 32 hexadecimal digits.
    #[arg(long, value_name = "HEX")]
    counter: Option<String>,
    #[command(flatten)]
    drive: drive::DriveArgs,
    /// Write digests and matches as they come out of the engine, instead of as text.
    #[arg(long)]
    raw: bool,
}

/// Bytes of a nonce before a sealed message.
const NONCE: usize = 12;

/// Where this host has what was borrowed by `lease`.
fn place_of(lease: Lease) -> FunctionPlace {
    let at = lease.socket.unwrap_or_default();
    match (lease.placement, at.rsplit_once('/')) {
        // The function's directory in sysfs, which its address names.
        (Placement::Host, Some((_, address))) => FunctionPlace::Machine(address.to_owned()),
        _ => FunctionPlace::Socket(at.into()),
    }
}

/// Opens the accelerator at a place for so many descriptors under way.
fn open(place: &FunctionPlace, depth: u16) -> Result<Accel, Failure> {
    let options = AccelOptions { depth, ..AccelOptions::default() };
    Accel::open_at(place, Duration::from_secs(10), options).map_err(|error| match place {
        FunctionPlace::Socket(_) => failed(error),
        FunctionPlace::Machine(_) => not_set_up(&error),
    })
}

/// Of a function of this machine that cannot be driven.
fn not_set_up(error: &dyn std::error::Error) -> Failure {
    let remedy = "see \"In a guest\" in the chapter about renting accelerators";
    Failure::new(error.to_string(), remedy)
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let operations = self.operations()?;
        let place = self.place(common).await?;
        if let Some(source) = self.drive.source(common).await? {
            return self.run_drive(&source, &place, &operations, output);
        }
        let mut input = Vec::new();
        let read = std::io::stdin().lock().read_to_end(&mut input);
        read.map_err(|cause| Failure::new(format!("standard input: {cause}"), "try again"))?;
        let mut nonce = [0; 16];
        let mut prefix = Vec::new();
        if operations.contains(&Operation::Aes256GcmSeal) {
            prefix = random(NONCE)?;
            nonce[..NONCE].copy_from_slice(&prefix);
        } else if operations.contains(&Operation::Aes256GcmOpen) {
            if input.len() < NONCE {
                return Err(Failure::usage(
                    "the input is too short",
                    "give what aes256gcm put out",
                ));
            }
            nonce[..NONCE].copy_from_slice(&input[..NONCE]);
            input.drain(..NONCE);
        } else if operations.contains(&Operation::Aes256Ctr) {
            nonce = counter(self.counter.as_deref())?;
        }
        // One message at a time: more than one is not under way.
        let mut accel = open(&place, 1)?;
        let accel = &mut accel;
        let stages = self.stages(accel, &operations)?;
        let work = MessageWork { stages: &stages, nonce, associated: 0 };
        let result = accel.run(&work, &input, accel.info().largest as usize).map_err(failed)?;
        self.show(output, *operations.last().unwrap_or(&Operation::Copy), prefix, result)
    }

    /// Where the accelerator is. A machine that has one uses that: it is in a VM.
    async fn place(&self, common: &Common) -> Result<FunctionPlace, Failure> {
        if let Some(socket) = &self.socket {
            return Ok(FunctionPlace::Socket(socket.clone()));
        }
        if let Some(address) = &self.device {
            return Ok(FunctionPlace::Machine(address.clone()));
        }
        let mut own = match self.lease {
            None => Accel::find().map_err(failed)?,
            Some(_) => Vec::new(),
        };
        match (own.len(), own.pop()) {
            (0, _) => Ok(place_of(self.lease(common).await?)),
            (1, Some(address)) => Ok(FunctionPlace::Machine(address)),
            _ => {
                let remedy = "say which with --device; `lspci -d 1234:7261` lists them";
                Err(Failure::usage("this machine has several accelerators", remedy))
            }
        }
    }

    fn operations(&self) -> Result<Vec<Operation>, Failure> {
        let named = self.operations.split('+').map(|name| {
            Operation::named(name).filter(|of| known().any(|known| known == *of)).ok_or(name)
        });
        named.collect::<Result<_, _>>().map_err(|name| {
            let names: Vec<_> = known().map(Operation::name).collect();
            Failure::usage(
                format!("there is no operation `{name}`"),
                format!("use one of {}", names.join(", ")),
            )
        })
    }

    /// The lease that is meant.
    async fn lease(&self, common: &Common) -> Result<Lease, Failure> {
        let mut leases = borrowed(common, DeviceCapability::Engines, self.lease).await?;
        match (leases.len(), leases.pop()) {
            (1, Some(lease)) => Ok(lease),
            (0, _) => {
                let remedy = "borrow one: rackbus borrow HOST/DEVICE.vf1 --for HOST";
                Err(Failure::new("no such accelerator is borrowed", remedy))
            }
            _ => Err(Failure::usage("several accelerators are borrowed", "say which with --lease")),
        }
    }

    fn stages(
        &self,
        accel: &mut Accel,
        operations: &[Operation],
    ) -> Result<Vec<(Operation, u16)>, Failure> {
        operations.iter().map(|operation| self.stage(accel, *operation)).collect()
    }

    /// An operation with the context that it needs.
    fn stage(&self, accel: &mut Accel, operation: Operation) -> Result<(Operation, u16), Failure> {
        let (file, what) = match operation {
            Operation::Aes256Ctr | Operation::Aes256GcmSeal | Operation::Aes256GcmOpen => {
                (&self.key, "--key FILE, 32 bytes")
            }
            Operation::RegexScan => (&self.patterns, "--patterns FILE"),
            _ => return Ok((operation, 0)),
        };
        let Some(file) = file else {
            let error = format!("{} needs {what}", operation.name());
            return Err(Failure::usage(error, "name the file"));
        };
        let data = read(file)?;
        let context = accel.create_context(operation, &data).map_err(|error| {
            Failure::usage(format!("{}: {error}", file.display()), format!("give {what}"))
        })?;
        Ok((operation, context))
    }

    /// What came out as text, where people read it as that.
    fn text(&self, last: Operation, result: &[u8]) -> Option<String> {
        match last {
            _ if self.raw => None,
            Operation::Sha256 | Operation::Sha3_512 | Operation::Blake3 => Some(hex(result)),
            Operation::Crc32c => {
                // As a number, as other programs write it.
                let number: Vec<u8> = result.iter().rev().copied().collect();
                Some(hex(&number))
            }
            Operation::RegexScan => Some(matches(result)),
            _ => None,
        }
    }

    fn show(
        &self,
        output: &Output,
        last: Operation,
        mut prefix: Vec<u8>,
        result: Vec<u8>,
    ) -> Result<(), Failure> {
        let text = self.text(last, &result);
        prefix.extend_from_slice(&result);
        if output.is_json() {
            let value = json!({ "bytes": prefix.len(), "text": text, "hex": hex(&prefix) });
            output.result(&value, |_| {});
            return Ok(());
        }
        match text {
            Some(text) => output.line(text.trim_end()),
            None => {
                let mut stdout = std::io::stdout().lock();
                let written = stdout.write_all(&prefix).and_then(|()| stdout.flush());
                written.map_err(|cause| {
                    Failure::new(format!("standard output: {cause}"), "try again")
                })?;
            }
        }
        Ok(())
    }
}

/// The leases of functions with a capability that can be opened here; of these the one with that number, if it is given.
async fn borrowed(
    common: &Common,
    wanted: DeviceCapability,
    number: Option<u64>,
) -> Result<Vec<Lease>, Failure> {
    let client = client(common).await?;
    let devices = client.devices().await?;
    let devices = devices.iter().filter(|device| capability::can(device, wanted));
    let functions: Vec<&str> = devices.map(|device| device.function.as_str()).collect();
    let mut leases = client.leases(false).await?;
    leases.retain(|lease| {
        lease.socket.is_some()
            && functions.contains(&lease.function.as_str())
            && number.is_none_or(|number| number == lease.lease)
    });
    Ok(leases)
}

/// The operations that messages go through: those that a service level can name.
fn known() -> impl Iterator<Item = Operation> {
    rackbus_devices::accel::profile::rentable()
}

fn hex(data: &[u8]) -> String {
    data.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A line for each match: the pattern's number, and the place behind its end.
fn matches(result: &[u8]) -> String {
    let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or_default();
    let line = |entry: &[u8]| format!("{} {}\n", number(&entry[..8]), number(&entry[8..]));
    result.chunks_exact(16).map(line).collect()
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|cause| {
        Failure::usage(format!("{}: {cause}", file.display()), "name another file")
    })
}

fn random(count: usize) -> Result<Vec<u8>, Failure> {
    let mut data = vec![0; count];
    let source = std::fs::File::open("/dev/urandom");
    let filled = source.and_then(|mut source| source.read_exact(&mut data));
    filled.map_err(|cause| Failure::new(format!("/dev/urandom: {cause}"), "mount /dev"))?;
    Ok(data)
}

fn counter(text: Option<&str>) -> Result<[u8; 16], Failure> {
    let wrong = || {
        let remedy = "give --counter with 32 hexadecimal digits, others for each message of a key";
        Failure::usage("aes256ctr needs its first counter block", remedy)
    };
    let text = text.filter(|text| text.len() == 32 && text.is_ascii()).ok_or_else(wrong)?;
    u128::from_str_radix(text, 16).map(u128::to_be_bytes).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_lease_is_used_at_its_socket_or_where_this_hosts_pci_tree_has_the_function() {
        let lease = |placement: &str, socket: &str| -> Lease {
            let lease = json!({
                "lease": 1, "function": "alpha/a0.vf1", "lender": "alpha", "borrower": "beta", "epoch": 1,
                "placement": placement, "stage": "active", "socket": socket, "returned": false, "since_ms": 0,
            });
            serde_json::from_value(lease).unwrap()
        };
        let socket = "/run/rackbus/lab/beta/functions/1.sock";
        for placement in ["lender", "borrower"] {
            assert_eq!(place_of(lease(placement, socket)), FunctionPlace::Socket(socket.into()));
        }
        let tree = lease("host", "/sys/bus/pci/devices/1ff00:00:00.0");
        assert_eq!(place_of(tree), FunctionPlace::Machine("1ff00:00:00.0".to_owned()));
    }
}
