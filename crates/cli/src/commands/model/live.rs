//! The running rack, as the model takes it: its file's topology, and its leases as the workload.

use rackbus_control::api::{Lease, LeaseStage};

use crate::Common;
use crate::commands::client;
use crate::output::Failure;
use crate::paths::{find_run_dir, running};

use super::Source;

/// The rack file of the running rack.
pub fn rack(common: &Common) -> Result<Source, Failure> {
    Source::read(&running(&find_run_dir(common)?)?.file)
}

/// A workload of its leases: random reads of each borrowed drive, 32 at a time.
pub async fn leases(common: &Common) -> Result<Source, Failure> {
    let leases = client(common).await?.leases(false).await?;
    let text: String =
        leases.iter().filter(|lease| lease.stage == LeaseStage::Active).map(flow).collect();
    if text.is_empty() {
        return Err(Failure::new(
            "nothing is lent in the running rack",
            "borrow something first, or name a workload file",
        ));
    }
    Ok(Source { name: "the rack's leases".into(), text, ..Source::default() })
}

fn flow(lease: &Lease) -> String {
    format!(
        "[flows.lease-{}]\nkind = \"nvme-read\"\nhost = \"{}\"\ndevice = \"{}\"\nsize = \"4 KiB\"\n\
         depth = 32\nrandom = true\n",
        lease.lease, lease.borrower, lease.function
    )
}
