//! The running rack, as the model takes it: its file's topology, and its leases as the workload.

use rackbus_control::api::{Lease, LeaseStage};
use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::DeviceCapability;

use crate::Common;
use crate::commands::client;
use crate::output::Failure;
use crate::paths::{find_run_dir, running};

use super::Source;

/// The rack file of the running rack.
pub fn rack(common: &Common) -> Result<Source, Failure> {
    Source::read(&running(&find_run_dir(common)?)?.file)
}

/// A workload of the leases in `rack`: random reads of each borrowed drive, 32 at a time. With it the functions that are
/// lent and are no NVMe drives, which have no flow.
pub async fn leases(common: &Common, rack: &Source) -> Result<(Source, Vec<String>), Failure> {
    let (described, _) = parse_rack(&rack.name, &rack.text).map_err(|error| rack.misread(error))?;
    let is_drive = |function: &str| {
        let mut drives = described
            .functions()
            .filter(|(_, device)| device.can(DeviceCapability::Blocks) == Some(true));
        drives.any(|(name, _)| name.to_string() == function)
    };
    let leases = client(common).await?.leases(false).await?;
    let active = leases.into_iter().filter(|lease| lease.stage == LeaseStage::Active);
    let (drives, others): (Vec<Lease>, Vec<Lease>) =
        active.partition(|lease| is_drive(&lease.function));
    let others: Vec<String> = others.into_iter().map(|lease| lease.function).collect();
    if drives.is_empty() {
        let what = match others.is_empty() {
            true => "nothing is lent in the running rack".to_owned(),
            false => {
                format!("no NVMe drive is lent in the running rack, but {}", others.join(", "))
            }
        };
        return Err(Failure::new(what, "borrow a drive first, or name a workload file"));
    }
    let text = drives.iter().map(flow).collect();
    Ok((Source { name: "the rack's leases".into(), text, ..Source::default() }, others))
}

fn flow(lease: &Lease) -> String {
    format!(
        "[flows.lease-{}]\nkind = \"nvme-read\"\nhost = \"{}\"\ndevice = \"{}\"\nsize = \"4 KiB\"\n\
         depth = 32\nrandom = true\n",
        lease.lease, lease.borrower, lease.function
    )
}
