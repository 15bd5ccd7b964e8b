//! Devices that the node lends from now on, or not any more, while it runs.

use std::sync::Arc;

use rackbus_lease::{LeaseId, LenderAction};

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
