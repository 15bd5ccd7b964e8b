//! Borrows devices for programs of this host, by leases of the control plane's like any other's.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::api::{
    BorrowRequest, Device, DeviceState, Isolation, Lease, ReportedIdentity,
};
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_devices::class::{self, PciIdentity};
use rackbus_segment::NodeId;
use rackbus_segment::message::{BorrowedEntry, DeviceEntry, Refusal, fabric_device_id};

use crate::host::control_socket;
use crate::segments::devices::ProgramDevices;
use crate::users::{AGAIN, give_back, is_open};

/// How long a program waits for an answer: less than for one of its node, which it assumes to be dead after that.
const PATIENCE: Duration = Duration::from_secs(5);

/// Borrows for the programs of one host.
#[derive(Debug)]
pub struct Programs {
    host: String,
    nodes: BTreeMap<String, NodeId>,
    client: ControlClient,
    runtime: tokio::runtime::Handle,
    /// Held by everything that is to be returned, and not yet is.
    returning: Arc<()>,
}

impl Programs {
    /// For the programs of `host` in the rack's run directory, whose hosts have these numbers. To be called inside
    /// of a tokio runtime.
    pub fn new(run_dir: &Path, host: &str, hosts: &BTreeMap<NodeId, String>) -> Programs {
        let nodes = hosts.iter().map(|(node, name)| (name.clone(), *node)).collect();
        let client = ControlClient::new(&control_socket(run_dir));
        let runtime = tokio::runtime::Handle::current();
        let returning = Arc::default();
        Programs { host: host.to_owned(), nodes, client, runtime, returning }
    }

    /// A device of the rack, as programs know it. Nothing where it is not there, or of a host without a number.
    fn entry(&self, device: &Device) -> Option<DeviceEntry> {
        if matches!(device.state, DeviceState::Absent | DeviceState::Unreachable) {
            return None;
        }
        let (host, name) = device.function.split_once('/')?;
        let node = *self.nodes.get(host)?;
        let identity = identity(device);
        Some(DeviceEntry {
            fdid: fabric_device_id(node, name),
            function: device.function.clone(),
            node,
            vendor_id: identity.vendor_id,
            device_id: identity.device_id,
            class: identity.class,
            free: device.state == DeviceState::Offered,
        })
    }
}

/// What PCI knows a device by: what its class tells, or else what its lender reports.
fn identity(device: &Device) -> ReportedIdentity {
    if let Some(class) = class::pci_identity(&device.kind) {
        let PciIdentity { vendor_id, device_id, class } = class;
        return ReportedIdentity { vendor_id, device_id, class };
    }
    device.report.as_ref().and_then(|report| report.identity).unwrap_or_default()
}

impl Programs {
    /// A lease, for as long as a program waits. One that comes later is returned.
    fn lease(&self, request: BorrowRequest) -> Result<Lease, Refusal> {
        let client = self.client.clone();
        let mut asking = self.runtime.spawn(async move { borrow_surely(&client, &request).await });
        let late =
            self.runtime.block_on(async { tokio::time::timeout(PATIENCE, &mut asking).await });
        match late {
            Ok(Ok(answer)) => answer.map_err(refusal),
            Ok(Err(error)) => Err(Refusal::System(error.to_string())),
            Err(_) => {
                let (client, returning) = (self.client.clone(), self.returning.clone());
                self.runtime.spawn(async move {
                    let _returning = returning;
                    if let Ok(Ok(lease)) = asking.await {
                        give_back(&client, lease.lease, || false).await;
                    }
                });
                let said = "the device's lender, or the control plane, does not answer; try again";
                Err(Refusal::NotLent(said.to_owned()))
            }
        }
    }
}

impl Programs {
    /// Returns a lease, for as long as it takes.
    fn return_lease(&self, lease: u64) -> tokio::task::JoinHandle<()> {
        let (client, returning) = (self.client.clone(), self.returning.clone());
        self.runtime.spawn(async move {
            let _returning = returning;
            give_back(&client, lease, || false).await;
        })
    }
}

/// Borrows under one key, which is asked with again for as long as it is open whether there is a lease: one that nobody
/// knows of would be lent for ever.
async fn borrow_surely(
    client: &ControlClient,
    request: &BorrowRequest,
) -> Result<Lease, ControlClientError> {
    let (key, [mut wait, most]) = (ControlClient::new_key(), AGAIN);
    let mut is_asked = false;
    loop {
        match client.borrow_under(request, &key).await {
            // It was never there: nothing was asked of it.
            Err(ControlClientError::Unreachable { .. }) if is_asked => {}
            Err(error @ ControlClientError::Unreachable { .. }) => return Err(error),
            // Nobody led, so nobody has granted anything.
            Err(ControlClientError::Refused(refused))
                if !is_open(&refused.code) || (!is_asked && refused.code == "not_the_leader") =>
            {
                return Err(ControlClientError::Refused(refused));
            }
            Ok(lease) => return Ok(lease),
            Err(error) => {
                tracing::debug!(%error, function = request.function, "asked again");
                is_asked = true;
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(most);
    }
}

/// Why a device is not borrowed.
fn refusal(error: ControlClientError) -> Refusal {
    match error {
        ControlClientError::Refused(refused) => match refused.code.as_str() {
            "held" | "returning" | "queued" => Refusal::DeviceInUse(refused.to_string()),
            "unknown_function" => Refusal::NoSuchDevice,
            _ => Refusal::NotLent(refused.to_string()),
        },
        other => Refusal::NotLent(other.to_string()),
    }
}

impl ProgramDevices for Programs {
    fn list(&self) -> Result<Vec<DeviceEntry>, Refusal> {
        let asked = async { tokio::time::timeout(PATIENCE, self.client.devices()).await };
        let late = |_| Refusal::NotLent("the control plane does not answer; try again".to_owned());
        let devices = self.runtime.block_on(asked).map_err(late)?.map_err(refusal)?;
        Ok(devices.iter().filter_map(|device| self.entry(device)).collect())
    }

    fn borrow(&self, fdid: u64, strict: bool, user: &str) -> Result<BorrowedEntry, Refusal> {
        let device = self.list()?.into_iter().find(|device| device.fdid == fdid);
        let device = device.ok_or(Refusal::NoSuchDevice)?;
        let isolation = if strict { Isolation::Strict } else { Isolation::Shared };
        let request = BorrowRequest {
            isolation,
            group: Some(user.to_owned()),
            ..BorrowRequest::new(&device.function, &self.host)
        };
        let lease = self.lease(request)?;
        let Some(socket) = lease.socket else {
            self.abandon(vec![lease.lease]);
            return Err(Refusal::NotLent(format!("{} has no socket here", device.function)));
        };
        tracing::info!(lease = lease.lease, function = device.function, user, "a program borrows");
        Ok(BorrowedEntry { lease: lease.lease, device, socket })
    }

    fn give_back(&self, lease: u64) {
        let returning = self.return_lease(lease);
        // It goes on when it takes too long: the lender may be gone, and is waited for.
        // Whether it was in time does not matter.
        let _ = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, returning).await });
    }

    fn abandon(&self, leases: Vec<u64>) {
        for lease in leases {
            tracing::info!(lease, "a program has ended; what it borrowed goes back");
            self.return_lease(lease);
        }
    }

    fn pending(&self) -> usize {
        Arc::strong_count(&self.returning) - 1
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::users::tests::answer_all;

    const ENDING: &str = r#"{"code":"ending","error":"it ends","remedy":"ask again"}"#;
    const LENT: &str = r#"{"lease":7,"function":"alpha/nvme0","lender":"alpha","borrower":"beta",
        "epoch":1,"stage":"active","socket":"/run/x.sock","reason":null,"returned":false,
        "since_ms":1,"until_ms":null}"#;

    /// A class tells of its own functions, whatever their lender says; of others their lender does.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_device_is_its_class_tells_or_its_lender() {
        let folder = tempfile::tempdir().unwrap();
        let hosts = BTreeMap::from([(4, "alpha".to_owned())]);
        let programs = Programs::new(folder.path(), "alpha", &hosts);
        let class = |kind: &str, identity: Option<&str>| {
            let report = identity.map_or("null".to_owned(), |it| format!("{{\"identity\":{it}}}"));
            let text = format!(
                r#"{{"function":"alpha/d","kind":"{kind}","detail":"","state":"offered","holder":null,
                "lease":null,"epoch":0,"report":{report}}}"#
            );
            programs.entry(&serde_json::from_str(&text).unwrap()).unwrap().class
        };
        let says = Some(r#"{"vendor_id":1,"device_id":2,"class":131072}"#);
        assert_eq!(class("vfio", says), 0x02_0000);
        assert_eq!(class("upstream", says), 0x02_0000);
        assert_eq!(class("upstream", None), 0);
        assert_eq!(class("nvme", says), 0x01_0802);
    }

    /// The control plane does not answer: what a program that has ended had is still to be returned, and the node must not
    /// forget it.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_not_returned_yet_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = control_socket(folder.path());
        let programs = Programs::new(folder.path(), "beta", &BTreeMap::new());
        assert_eq!(programs.pending(), 0);
        programs.abandon(vec![7]);
        assert_eq!(programs.pending(), 1);
        let listener = UnixListener::bind(&path).unwrap();
        let answered = std::thread::spawn(move || answer_all(&listener, &[(200, LENT)]));
        answered.join().unwrap();
        while programs.pending() > 0 {
            tokio::task::yield_now().await;
        }
    }

    /// What was asked may have been done: it is asked for again, with the same key.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_lease_whose_grant_is_open_is_asked_for_again_under_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let client = ControlClient::new(&path);
        let request = BorrowRequest::new("alpha/nvme0", "beta");
        let listener = UnixListener::bind(&path).unwrap();
        let answers = [(502, ENDING), (503, ENDING), (200, LENT)];
        let asked = std::thread::spawn(move || answer_all(&listener, &answers));
        let lease = borrow_surely(&client, &request).await.unwrap();
        assert_eq!(lease.lease, 7);
        let keys: Vec<String> = asked.join().unwrap().into_iter().map(|(_, key)| key).collect();
        assert!(!keys[0].is_empty() && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    }
}
