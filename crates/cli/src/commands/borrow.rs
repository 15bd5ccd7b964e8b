//! `rackbus borrow`: takes a function for a host.

use std::path::Path;
use std::time::Duration;

use rackbus_control::ControlClient;
use rackbus_control::api::{AcceleratorChoice, BorrowRequest, Isolation, Lease, Placement};
use rackbus_vm::interrupts::InterruptChoice;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Borrow a device for a host. Prints the vfio-user socket by which QEMU (or any vfio-user
/// client) on that host uses it, or where it is in the host's own PCI tree.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus borrow alpha/nvme0 --for beta
  rackbus borrow alpha/nvme0 --for beta --isolation strict   alpha gets none of beta's memory
  rackbus borrow alpha/d0 --for beta --placement host        in beta's own PCI tree, through an NTB
  rackbus borrow alpha/nvme0 --for beta --group db           reaches gamma/ram0 of the same group
  rackbus borrow gamma/ram0 --for beta --group db            peer-to-peer, once its BAR is programmed
  rackbus borrow alpha/nvme0 --for beta --wait=10min         as soon as others have returned it
  rackbus borrow alpha/nvme0 --for beta --vm web             plugged into beta's running VM web
  rackbus borrow --accel 'aes256gcm 4 Gbit/s' --for beta     an accelerator that keeps this level
  rackbus borrow alpha/nvme0 --for beta --json | jq -r .socket")]
pub struct Args {
    /// The device, HOST/DEVICE.
    #[arg(required_unless_present = "level")]
    device: Option<String>,
    /// The host that shall have it.
    #[arg(long = "for", value_name = "HOST")]
    host: String,
    /// An accelerator with this service level: an engine and what it does each second at least. Without
    /// DEVICE, of those that have a function free and keep it the one where most is left for that engine.
    #[arg(long = "accel", value_name = "LEVEL")]
    level: Option<String>,
    #[command(flatten)]
    trust: Trust,
    /// Show it with MSI-X, for a driver that is not QEMU: QEMU ends when such a function is unplugged.
    #[arg(long)]
    msix: bool,
    /// The program that it is for: functions that one host borrows for the same group reach each other's
    /// memory by DMA. Those of a VM do so without. With strict isolation a function reaches none of the others,
    /// and none of them reaches it: the group is a name for what is used together then.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// The running VM of that host that it is plugged into; `rackbus return` unplugs it.
    #[arg(long, value_name = "NAME", conflicts_with = "msix")]
    vm: Option<String>,
    /// Wait so long while others have it; without a time, a day. Who waits gets it in turn.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "1day",
        value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
    /// Of those who wait, the greatest priority comes first, from 0 to 255.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    priority: u8,
}

/// How far the borrower trusts the lender.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Trust {
    /// `strict`: the lender gets no memory of the borrower's; the device's controller then runs at the
    /// borrower.
    #[arg(long, value_enum, default_value_t = IsolationName::Shared, value_name = "HOW")]
    isolation: IsolationName,
    /// Where the device's controller runs; without it, where the isolation needs it. `host`: the device appears in
    /// the borrowing host's own PCI tree, through an NTB, and that host's kernel drives it.
    #[arg(long, value_enum, value_name = "WHERE")]
    placement: Option<PlacementName>,
}

/// [`Isolation`], as an argument.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub enum IsolationName {
    #[default]
    Shared,
    Strict,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlacementName {
    Lender,
    Borrower,
    Host,
}

impl From<IsolationName> for Isolation {
    fn from(name: IsolationName) -> Isolation {
        match name {
            IsolationName::Shared => Isolation::Shared,
            IsolationName::Strict => Isolation::Strict,
        }
    }
}

impl Trust {
    /// Whether the device is to appear in the host's own PCI tree.
    pub fn in_host(self) -> bool {
        matches!(self.placement, Some(PlacementName::Host))
    }

    /// Asks for `device` for a VM of `host`, with that much trust.
    ///
    /// # Errors
    /// When it is to be in the host's own PCI tree.
    pub fn request_for_vm(self, device: &str, host: &str) -> Result<BorrowRequest, Failure> {
        match self.in_host() {
            true => Err(Failure::usage(
                "a VM's functions cannot be in its host's own PCI tree",
                "borrow them for the VM without --placement host",
            )),
            false => Ok(self.request(device, host)),
        }
    }

    /// Asks for `device` on `host`, with that much trust.
    pub fn request(self, device: &str, host: &str) -> BorrowRequest {
        BorrowRequest {
            isolation: self.isolation.into(),
            placement: self.placement.map(|placement| match placement {
                PlacementName::Lender => Placement::Lender,
                PlacementName::Borrower => Placement::Borrower,
                PlacementName::Host => Placement::Host,
            }),
            ..BorrowRequest::new(device, host)
        }
    }
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let wait_ms = self.wait.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let client = client(common).await?;
        // Which accelerator keeps a level that is asked for without a device, the control plane knows.
        let anywhere = self.level.clone().filter(|_| self.device.is_none());
        let accelerator = anywhere.map(|level| AcceleratorChoice { level });
        let request = BorrowRequest {
            group: self.group.clone(),
            vm: self.vm.clone(),
            wait_ms,
            priority: self.priority,
            level: self.level.clone().filter(|_| accelerator.is_none()),
            accelerator,
            ..self.trust.request(self.device.as_deref().unwrap_or_default(), &self.host)
        };
        let lease = client.borrow_as(&request).await?;
        if let (true, Some(socket)) = (self.msix && !self.trust.in_host(), &lease.socket)
            && let Err(error) = InterruptChoice::Msix.note(Path::new(socket))
        {
            return Err(not_shown(&client, &lease, &error).await);
        }
        output.result(&lease, |o| {
            o.line(&format!(
                "lease {}: {} is lent to {}",
                lease.lease, lease.function, lease.borrower
            ));
            o.line(&place(&lease));
            if lease.placement == Placement::Host {
                o.line(REACH);
            }
            if lease.placement == Placement::Borrower && self.group.is_some() {
                o.line(APART);
            }
            if lease.placement == Placement::Borrower
                && is_scheduled_by_session()
                && processors() < POLLING_THREADS
            {
                o.line(BY_SESSION);
            }
        });
        Ok(())
    }
}

/// What is said of a function in a host's own PCI tree.
const REACH: &str =
    "through its window the device reaches all of this host's memory that the window covers";

/// What is said of a function of a group whose controller runs at the borrower.
const APART: &str = "its controller runs at the borrower: it reaches no memory of the group's other functions, and they \
    reach none of its";

/// Driver, front and medium.
const POLLING_THREADS: usize = 3;

/// What is said where these have fewer processors, and may not yield to each other.
const BY_SESSION: &str = "this machine has fewer processors than threads that poll for it, and schedules by session: \
    with `sysctl kernel.sched_autogroup_enabled=0` they give way to each other (a drive: up to three times as fast)";

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether Linux shares processors among sessions first, so that a thread that yields does not yield to those of others.
fn is_scheduled_by_session() -> bool {
    let setting = std::fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
    setting.is_ok_and(|it| it.trim() == "1")
}

/// Returns a function that cannot be shown with MSI-X, so that nobody has to look for its lease.
async fn not_shown(
    client: &ControlClient,
    lease: &Lease,
    error: &impl std::fmt::Display,
) -> Failure {
    let returned = match client.give_back(lease.lease).await {
        Ok(_) => "it was returned".to_owned(),
        Err(cause) => format!("lease {} was not returned: {cause}", lease.lease),
    };
    let what = format!("{} cannot be shown with MSI-X: {error}; {returned}", lease.function);
    Failure::new(what, "borrow it on the host that it is for")
}

/// Where the borrower finds the function.
fn place(lease: &Lease) -> String {
    let path = lease.socket.as_deref().unwrap_or_default();
    match lease.placement {
        _ if lease.vm.is_some() => {
            format!("plugged into VM {}", lease.vm.as_deref().unwrap_or_default())
        }
        Placement::Host => format!("function {path}"),
        Placement::Lender | Placement::Borrower => format!("socket {path}"),
    }
}
