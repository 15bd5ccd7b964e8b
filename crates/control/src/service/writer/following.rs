//! The writer has the running rack be that of another file.

use super::{NewRackFile, Step, Writer};
use crate::api::ApiError;
use crate::service::following::{HostsChange, host_in_use};
use crate::service::sections::listed_in;

impl Writer {
    /// From now on the rack file is `file`. What it lists is in the rack already; changes of devices that it has
    /// overtaken are forgotten, as they are when the rack is started. Hosts that it has no more leave the rack.
    pub(super) fn follow_file(
        &mut self,
        file: NewRackFile,
    ) -> Result<Result<(), ApiError>, ApiError> {
        let NewRackFile { inventory, read } = file;
        if let Err(refused) = self.shared.check_follows(&inventory) {
            return Ok(Err(refused));
        }
        let hosts = HostsChange::between(&self.shared.inventory(), &inventory);
        let before = self.shared.exchange_reader(Some(read));
        let followed = self.step(|authority, now| {
            let mut outcome = match authority.remove_hosts(now, &hosts.left) {
                Ok(outcome) => outcome,
                Err(refused) => return (Err(host_in_use(&refused)), Step::default()),
            };
            let listed = |host: &str, device: &str| listed_in(&inventory.sections, host, device);
            outcome.append(authority.relist(now, listed));
            (Ok(()), Step { events: hosts.events(), ..outcome.into() })
        });
        match &followed {
            Ok(Ok(())) => {
                self.shared.renew_inventory();
                // Who follows the changes hears of hosts that nobody has heard yet.
                hosts.joined.iter().for_each(|host| self.shared.tell_host(host));
            }
            _ => drop(self.shared.exchange_reader(before)),
        }
        followed
    }
}
