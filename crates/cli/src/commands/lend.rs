//! `rackbus lend`: takes PCI functions of this machine from their drivers, and gives them back.

use rackbus_vfio::binding::DRIVER;
use rackbus_vfio::{Binding, Bindings, Facts, PciAddress, VfioError};
use serde::Serialize;

use crate::output::{Cell, Failure, Output, Tone};

/// Take a PCI function of this machine from its driver so that it can be lent, or give it back.
/// Without an address, list the functions, and why some cannot be lent.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus lend                              what this machine has, and what could be lent
  rackbus lend 0000:03:00.0 --check         only look: its IOMMU group, and what is in the way
  rackbus lend 0000:03:00.0 --name nvme0    take it, and print its section for the rack file
  rackbus lend 0000:04:00.0 --functions 4   make four virtual functions and take those
  rackbus lend 0000:03:00.0 --return        back to the driver that it was taken from
  rackbus lend --return                     the same for all that was taken

A node takes what its rack file names (kind = \"vfio\") by itself, and gives it back when it ends. What a
node that was killed had taken, --return gives back.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage.")]
pub struct Args {
    /// Where the function is, as `lspci -D` shows it: 0000:03:00.0, or 03:00.0.
    #[arg(value_parser = address)]
    address: Option<PciAddress>,
    /// Its name in the rack, for the section that is printed.
    #[arg(long, value_name = "NAME", default_value = "device0")]
    name: String,
    /// Make so many virtual functions of it and take those; it stays with its driver.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..256), requires = "address")]
    functions: Option<u16>,
    /// Only look whether it could be taken.
    #[arg(long, requires = "address", conflicts_with_all = ["give_back", "functions"])]
    check: bool,
    /// Give it back to the driver that it was taken from; without an address, all that were taken.
    #[arg(long = "return", conflicts_with = "functions")]
    give_back: bool,
    /// Take it although a file system of it is mounted or its network is up; give it back although somebody uses
    /// it.
    #[arg(long)]
    force: bool,
}

fn address(text: &str) -> Result<PciAddress, String> {
    text.parse().map_err(|error: VfioError| error.to_string())
}

/// What errors say, as a failure and what to do.
fn failure(error: VfioError) -> Failure {
    let text = error.to_string();
    match text.split_once("; ") {
        Some((error, remedy)) => Failure::new(error, remedy),
        None => Failure::new(text, "see `rackbus lend --help`"),
    }
}

/// What was taken, or would be.
#[derive(Debug, Serialize)]
struct LendReport {
    #[serde(flatten)]
    facts: Facts,
    /// The driver that it goes back to.
    former: Option<String>,
    /// The virtual functions that were taken in its place.
    taken_functions: Vec<PciAddress>,
    /// Its section in the rack file.
    section: String,
}

/// A function of the machine, for the list.
#[derive(Debug, Serialize)]
struct Listed {
    #[serde(flatten)]
    facts: Facts,
    kind: &'static str,
    /// Who took it from its driver, as the note says.
    taker: Option<String>,
    /// Why it cannot be lent now.
    refused: Option<String>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let bindings = Bindings::here();
        match (self.address, self.give_back) {
            (None, false) => list(&bindings, output).map_err(failure),
            (Some(address), false) => self.take(&bindings, address, output),
            (one, true) => self.return_all(&bindings, one, output),
        }
    }

    fn take(
        &self,
        bindings: &Bindings,
        address: PciAddress,
        output: &Output,
    ) -> Result<(), Failure> {
        let sysfs = bindings.sysfs();
        let mut taken_functions = Vec::new();
        let mut former = sysfs.facts(address).map_err(failure)?.driver;
        if self.check {
            sysfs.check(address).map_err(failure)?;
            if !self.force {
                sysfs.check_unused(address).map_err(failure)?;
            }
        } else {
            bindings.load_driver();
            match self.functions {
                Some(count) => {
                    let made = bindings.make_virtual(address, count, TAKER);
                    taken_functions = made.map_err(failure)?;
                }
                None => {
                    let taken = bindings.take(address, TAKER, self.force).map_err(failure)?;
                    former = taken.binding.former;
                }
            }
        }
        let facts = sysfs.facts(address).map_err(failure)?;
        let section = self.section(address);
        let lent = LendReport { facts, former, taken_functions, section };
        output.result(&lent, |o| self.say(&lent, o));
        Ok(())
    }

    fn section(&self, address: PciAddress) -> String {
        let functions = self.functions.map(|count| format!("functions = {count}\n"));
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host = host.split('.').next().unwrap_or("host");
        let functions = functions.unwrap_or_default();
        format!(
            "[hosts.{host}.devices.{}]\nkind = \"vfio\"\naddress = \"{address}\"\n{functions}",
            self.name
        )
    }

    fn say(&self, lent: &LendReport, o: &Output) {
        let Facts { address, group, companions, .. } = &lent.facts;
        let kind = lent.facts.kind();
        let group = group.map_or_else(String::new, |group| format!("IOMMU group {group}"));
        let shared = match companions.is_empty() {
            true => format!("{group}, alone"),
            false => {
                let others: Vec<String> = companions.iter().map(PciAddress::to_string).collect();
                format!("{group}, with {}", others.join(", "))
            }
        };
        let from = lent.former.as_deref().unwrap_or("no driver");
        let done = match (self.check, lent.taken_functions.is_empty()) {
            (true, _) => format!("{address} ({kind}) can be lent; {from} has it"),
            (false, true) => {
                format!("{address} ({kind}) is taken from {from} and bound to {DRIVER}")
            }
            (false, false) => {
                let made: Vec<String> =
                    lent.taken_functions.iter().map(PciAddress::to_string).collect();
                format!("{address} ({kind}) has virtual functions: {}", made.join(", "))
            }
        };
        o.line(&done);
        o.line(&shared);
        o.line(&format!("for the rack file:\n\n{}", lent.section));
    }

    fn return_all(
        &self,
        bindings: &Bindings,
        one: Option<PciAddress>,
        output: &Output,
    ) -> Result<(), Failure> {
        let mut taken = bindings.taken().map_err(failure)?;
        if let Some(address) = one {
            taken.retain(|binding| binding.address == address);
            if taken.is_empty() {
                let error = format!("{address} was not taken from a driver");
                return Err(Failure::new(error, "`rackbus lend` lists what was"));
            }
        }
        // Virtual functions go with those that they are made of.
        taken.sort_by_key(|binding| binding.virtual_functions == 0);
        let mut given = Vec::new();
        for binding in taken {
            if !self.force {
                bindings.check_free(binding.address).map_err(failure)?;
            }
            given.extend(bindings.give_back(binding.address).map_err(failure)?);
        }
        output.result(&given, |o| {
            for Binding { address, former, virtual_functions, .. } in &given {
                o.line(&match (virtual_functions, former) {
                    (1.., _) => format!("{address}: its virtual functions are removed"),
                    (0, Some(driver)) => format!("{address} is back with {driver}"),
                    (0, None) => format!("{address} is back without a driver"),
                });
            }
            if given.is_empty() {
                o.line("nothing was taken");
            }
        });
        Ok(())
    }
}

/// Who takes functions here, as the notes have it.
const TAKER: &str = "rackbus lend";

fn list(bindings: &Bindings, output: &Output) -> Result<(), VfioError> {
    let sysfs = bindings.sysfs();
    let taken = bindings.taken()?;
    let mut listed = Vec::new();
    for address in sysfs.all()? {
        let facts = sysfs.facts(address)?;
        if facts.is_bridge() {
            continue;
        }
        let refused = sysfs.check(address).and_then(|_| sysfs.check_unused(address)).err();
        let taker = taken.iter().find(|it| it.address == address).map(|it| it.taker.clone());
        let (kind, refused) = (facts.kind(), refused.map(|error| error.to_string()));
        listed.push(Listed { facts, kind, taker, refused });
    }
    output.result(&listed, |o| {
        let rows = listed.iter().map(|it| {
            let (told, tone) = match (&it.taker, &it.refused) {
                (Some(taker), _) => (format!("taken by {taker}"), Tone::Good),
                (None, Some(refused)) => (refused.clone(), Tone::Bad),
                (None, None) => ("can be lent".to_owned(), Tone::Plain),
            };
            let group = it.facts.group.map_or_else(|| "-".to_owned(), |group| group.to_string());
            vec![
                it.facts.address.to_string().into(),
                it.kind.into(),
                format!("{:04x}:{:04x}", it.facts.vendor, it.facts.device).into(),
                group.into(),
                it.facts.driver.clone().unwrap_or_else(|| "-".to_owned()).into(),
                Cell(told, tone),
            ]
        });
        o.table(&["address", "kind", "id", "group", "driver", "lending"], rows.collect());
    });
    Ok(())
}
