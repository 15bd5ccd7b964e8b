//! What VMs borrow: taken for them, shown to them, found by the sockets they use, and returned.

use std::path::Path;

use rackbus_control::ControlClientError;
use rackbus_control::api::{BorrowRequest, Lease};
use rackbus_control::compositions::CompositionRequest;
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_pci::vfio_user::serve_function;
use rackbus_vm::{
    Assets, FunctionSpec, InterruptChoice, Plugged, ProcessName, Vm, VmRecord, interrupts,
};

use super::{Context, joined};
use crate::commands::borrow::Trust;
use crate::output::Failure;
use crate::process::{EndRequests, Undertaking};

/// For whom a VM's functions are borrowed, and how.
pub struct VmBorrowing<'a> {
    /// The host that the VM runs on.
    pub host: &'a str,
    /// How far it trusts the lenders.
    pub trust: Trust,
    /// Of a VM that this host does not know: the group that all of them are borrowed for.
    pub group: Option<&'a str>,
    /// This process, where it starts the VM itself: what nobody uses when it ends goes back.
    pub starter: Option<String>,
}

/// This process, by the name that nodes know processes by.
pub fn this_process() -> Option<String> {
    ProcessName::own().map(|name| name.to_string())
}

/// Borrows all of them, or none, also where this command is asked to end meanwhile.
pub async fn borrow_all(
    context: &Context<'_>,
    functions: &[String],
    borrowing: &VmBorrowing<'_>,
    requests: &mut EndRequests,
) -> Result<Vec<Lease>, Failure> {
    let VmBorrowing { host, trust, group, starter } = borrowing;
    let mut leases = Vec::new();
    for name in functions {
        let (group, starter) = (group.map(str::to_owned), starter.clone());
        let request = BorrowRequest { group, starter, ..trust.request_for_vm(name, host)? };
        let borrowed = match requests.unless_asked(context.client.borrow_as(&request)).await {
            Undertaking::Done(borrowed) => borrowed.map_err(Failure::from),
            Undertaking::DoneLate(borrowed) => {
                leases.extend(borrowed);
                Err(interrupted())
            }
            // The control plane takes back what nobody waits for.
            Undertaking::GivenUp => Err(interrupted()),
        };
        match borrowed {
            Ok(lease) => leases.push(lease),
            Err(failure) => {
                give_back_all(context, &leases).await;
                return Err(failure);
            }
        }
    }
    Ok(leases)
}

/// What is said where this command was asked to end, and has taken everything back.
pub fn interrupted() -> Failure {
    Failure::new("interrupted", "what was borrowed is returned; start again")
}

/// How many functions a composition has, when a VM on `host` can borrow it: nothing of it is borrowed. One that the
/// rack does not have is refused when it is borrowed.
pub async fn composed_functions(
    context: &Context<'_>,
    host: &str,
    name: &str,
    requests: &mut EndRequests,
) -> Result<usize, Failure> {
    let Undertaking::Done(compositions) =
        requests.unless_asked(context.client.compositions()).await
    else {
        return Err(interrupted());
    };
    let Some(known) = compositions?.into_iter().find(|known| known.name == name) else {
        return Ok(0);
    };
    if known.borrower != host {
        let remedy = format!("run the VM with --host {}, or save another one", known.borrower);
        let error = format!("the composition {name} is for {}", known.borrower);
        return Err(Failure::new(error, remedy));
    }
    if let Some(lease) = known.leases.first() {
        let error = format!("{} of the composition {name} is borrowed already", lease.function);
        let remedy = format!("return it first: `rackbus composition return {name}`");
        return Err(Failure::new(error, remedy));
    }
    Ok(known.functions.len())
}

/// Borrows a composition whole.
pub async fn borrow_composition(
    context: &Context<'_>,
    name: &str,
    requests: &mut EndRequests,
) -> Result<Vec<Lease>, Failure> {
    let request = CompositionRequest { starter: this_process(), ..CompositionRequest::default() };
    let borrowing = context.client.borrow_composition(name, &request);
    match requests.unless_asked(borrowing).await {
        Undertaking::Done(borrowed) => Ok(borrowed?.leases),
        Undertaking::DoneLate(borrowed) => {
            let leases = borrowed.map_or_else(|_| Vec::new(), |borrowed| borrowed.leases);
            give_back_all(context, &leases).await;
            Err(interrupted())
        }
        Undertaking::GivenUp => Err(interrupted()),
    }
}

/// Returns a lease. One that has ended with its VM is returned already.
pub async fn give_back(context: &Context<'_>, lease: u64) -> Result<Lease, Failure> {
    match context.client.give_back(lease).await {
        Err(ControlClientError::Refused(refused)) if refused.code == "over" => {
            Ok(context.client.lease(lease).await?)
        }
        outcome => Ok(outcome?),
    }
}

/// Returns all of them; what cannot be returned is said.
pub async fn give_back_all(context: &Context<'_>, leases: &[Lease]) {
    for lease in leases {
        if let Err(failure) = give_back(context, lease.lease).await {
            let (number, function) = (lease.lease, &lease.function);
            let text = format!("lease {number} of {function} is not returned: {}", failure.error);
            context.output.progress(&text);
        }
    }
}

/// A function as a VM takes it.
pub fn function(lease: &Lease) -> Option<FunctionSpec> {
    let socket = lease.socket.as_ref()?.into();
    Some(FunctionSpec { name: lease.function.clone(), socket })
}

/// The leases whose sockets a VM uses.
pub async fn leases_of(context: &Context<'_>, record: &VmRecord) -> Result<Vec<Lease>, Failure> {
    leases_at(context, &Vm::attach(record.clone()).functions()?).await
}

/// The leases whose sockets were plugged in.
pub async fn leases_at(context: &Context<'_>, plugged: &[Plugged]) -> Result<Vec<Lease>, Failure> {
    let leases = context.client.leases(false).await?;
    let used = |lease: &Lease| {
        let socket = lease.socket.as_deref().map(Path::new);
        plugged.iter().any(|p| Some(p.socket.as_path()) == socket)
    };
    Ok(leases.into_iter().filter(used).collect())
}

/// Settles the interrupts that these functions are shown with to this user's QEMU: MSI-X where it
/// can unplug such a function, or its user asks.
pub async fn show(leases: &[Lease], msix: bool) -> Result<(), Failure> {
    let functions: Vec<FunctionSpec> = leases.iter().filter_map(function).collect();
    if functions.is_empty() {
        return Ok(());
    }
    let settle = move || {
        let bears = interrupts::unplugs_msix(&Assets::of_user(), |socket| {
            let any = Nvme::new(&NvmeConfig::memory(1 << 20, "PROBE"));
            let any = Box::new(any.map_err(std::io::Error::other)?);
            serve_function(any, socket, Default::default())
        })?;
        let shown = InterruptChoice::choose(bears, msix);
        functions.iter().try_for_each(|function| shown.note(&function.socket))
    };
    Ok(joined(tokio::task::spawn_blocking(settle).await)??)
}
