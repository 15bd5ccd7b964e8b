//! Devices that the node lends from now on, or not any more, while it runs.

use std::sync::Arc;

use rackbus_lease::{LeaseId, LenderAction, ToldDevice};

use super::LentFunctions;
use crate::lendable::Lendable;

/// The functions of a device that is offered, by its name on the host and what the rack file would say of it. The error
/// says why there are none, for people.
pub type OfferedFunctions = Arc<dyn Fn(&str, &str) -> Result<NamedFunctions, String> + Send + Sync>;

/// Functions by their names on the host.
pub type NamedFunctions = Vec<(String, Arc<dyn Lendable>)>;

impl LentFunctions {
    /// The same, where devices may be offered, whose functions `offered` makes.
    #[must_use]
    pub fn with_offers(self, offered: OfferedFunctions) -> Self {
        LentFunctions { offered: Some(offered), ..self }
    }

    /// The functions of a device that was offered.
    ///
    /// # Errors
    /// Why it cannot be obtained, for people.
    pub(crate) fn functions_of(
        &self,
        device: &str,
        section: &str,
    ) -> Result<NamedFunctions, String> {
        let offered = self.offered.as_ref();
        offered.ok_or("this node's devices are fixed".to_owned())?(device, section)
    }

    /// The functions that another process lent when it left what this one goes on with: those of the rack file, as far as
    /// they were not withdrawn, and those of devices that were offered since.
    pub(super) fn inherited(&self, mut listed: NamedFunctions) -> NamedFunctions {
        let fence = self.fence();
        listed.retain(|(name, _)| !fence.is_withdrawn(name));
        for ToldDevice { device, section, functions, taken_on } in fence.offered() {
            if taken_on {
                // Whoever has it has it as it was offered: what the rack file says of it was withdrawn before.
                listed.retain(|(name, _)| !functions.contains(name));
            }
            match self.functions_of(device, section) {
                // What the rack file lists, too, is there already.
                Ok(offered) => {
                    let there: Vec<String> = listed.iter().map(|(name, _)| name.clone()).collect();
                    listed.extend(offered.into_iter().filter(|(name, _)| !there.contains(name)));
                }
                Err(error) => {
                    tracing::error!(
                        device,
                        error,
                        "a device that was offered cannot be offered again"
                    );
                }
            }
        }
        listed
    }

    /// Has a device ready to be lent. Its functions may be borrowed when this has returned without an error in what is
    /// to be sent.
    pub fn take_on(&self, device: &str, number: LeaseId, section: &str) -> Vec<LenderAction> {
        let outcome = self.functions_of(device, section).and_then(|functions| {
            let names: Vec<String> = functions.iter().map(|(name, _)| name.clone()).collect();
            let added = functions.into_iter().try_for_each(|(name, lendable)| {
                let lent = self.insert(&name, lendable).map_err(|error| error.to_string())?;
                let state = lent.lock();
                lent.start(&state).map_err(|error| error.to_string())
            });
            added.inspect_err(|_| names.iter().for_each(|name| self.remove(name)))
        });
        match &outcome {
            Ok(()) => tracing::info!(device, "lent from now on"),
            Err(error) => tracing::error!(device, error, "the device cannot be offered"),
        }
        self.fence.lock().offer_done(device, number, outcome)
    }

    /// Releases a device, whose functions nobody has.
    pub fn release(
        &self,
        device: &str,
        number: LeaseId,
        functions: &[String],
    ) -> Vec<LenderAction> {
        functions.iter().for_each(|name| self.remove(name));
        tracing::info!(device, "not lent any more");
        self.fence.lock().withdraw_done(device, number)
    }

    /// Takes a function out. Its place in the fabric stays, for one of the same name.
    fn remove(&self, name: &str) {
        let lent = self.write().remove(name);
        if let Some(lent) = lent {
            // Alone with it: whoever was refused has gone.
            let _state = lent.lock();
            lent.lendable.release();
        }
    }
}
