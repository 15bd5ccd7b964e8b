//! The writer has the running rack be that of another file.

use super::{NewRackFile, Writer};
use crate::api::ApiError;
use crate::service::sections::listed_in;

impl Writer {
    /// From now on the rack file is `file`. What it lists is in the rack already; changes of devices that it has
    /// overtaken are forgotten, as they are when the rack is started.
    pub(super) fn follow_file(
        &mut self,
        file: NewRackFile,
    ) -> Result<Result<(), ApiError>, ApiError> {
        let NewRackFile { inventory, read } = file;
        if let Err(refused) = self.shared.check_follows(&inventory) {
            return Ok(Err(refused));
        }
        let before = self.shared.exchange_reader(Some(read));
        let relisted = self.step(|authority, now| {
            let listed = |host: &str, device: &str| listed_in(&inventory.sections, host, device);
            ((), authority.relist(now, listed).into())
        });
        match relisted {
            Ok(()) => self.shared.renew_inventory(),
            Err(_) => drop(self.shared.exchange_reader(before)),
        }
        relisted.map(Ok)
    }
}
