//! What becomes of functions that another process had and this one cannot go on with.

use rackbus_control::api::DeviceReport;
use rackbus_fabric::{Fabric, FabricHandle, Lending, derive};
use rackbus_lease::{ArmedFor, LenderAction, Message};
use rackbus_link::shm::ShmLink;

use super::*;
use crate::lendable::NotReady;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.d0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n";

/// A function whose engine has stopped: there is nothing to save, and it begins anew each time.
#[derive(Debug, Default)]
struct Stopped;

impl Lendable for Stopped {
    fn arm(&self, _limit: Duration) -> Result<(), NotReady> {
        Ok(())
    }

    fn attach(
        &self,
        _lending: Lending,
        _stream: &Arc<dyn Stream>,
    ) -> std::io::Result<Box<dyn Attached>> {
        Err(std::io::Error::other("it is not needed here"))
    }

    fn save(&self, _: RestingConversation, _: Duration) -> Result<Option<SavedSession>, NotSaved> {
        Ok(None)
    }

    fn revoke(&self) {}

    fn describe(&self, known: DeviceReport) -> DeviceReport {
        known
    }
}

fn lender() -> LentFunctions {
    let rack = rackbus_fabric::rack::Rack::parse("rack.toml", RACK).unwrap();
    let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
    LentFunctions::new("alpha", fabric)
}

/// A lender of d0, which beta has by its first lease and is attached to.
fn lent_to_beta(function: Arc<dyn Lendable>) -> LentFunctions {
    let lender = lender();
    lender.add("d0", function).unwrap();
    let (device, borrower) = ("d0".to_owned(), "beta".to_owned());
    let (lease, epoch, placement) = (1, 1, Placement::Lender);
    let holder = ArmedFor { lease, epoch, borrower: borrower.clone(), placement };
    let level = None;
    let arm = Message::Arm { incarnation: 0, device, lease, epoch, borrower, placement, level };
    assert_eq!(lender.receive(arm).len(), 1);
    lender.arm("d0", epoch, None);
    lender.fence.lock().attach("d0", &holder).unwrap();
    lender
}

/// The lender in the place of `before`, where these devices can be made.
fn successor(before: &LentFunctions, devices: &[(String, Arc<dyn Lendable>)]) -> LentFunctions {
    let mut saved = before.save(&mut Parcel::default()).unwrap();
    let states = std::mem::take(&mut saved.states);
    let after = lender().with_fence(before.fence());
    let folder = tempfile::tempdir().unwrap();
    let link = ShmLink::new("test", folder.path(), ["alpha", "beta"]);
    let mut descriptors = ParcelDescriptors::default();
    assert!(after.resume_all(devices, states, &mut descriptors, &link).is_empty());
    after
}

/// The new program does not know its description. Its revocation would go on for ever, and no later restart in place
/// would be possible.
#[test]
fn a_function_that_the_successor_cannot_make_is_taken_back_all_the_same() {
    let before = lent_to_beta(Arc::new(Stopped));
    let after = successor(&before, &[]);
    let revoke = Message::Revoke { incarnation: 0, device: "d0".to_owned(), epoch: 1 };
    assert_eq!(after.receive(revoke).len(), 1);
    let said = after.revoke("d0", 1).unwrap();
    let answered = matches!(said[..], [LenderAction::Send(Message::Revoked { epoch: 1, .. })]);
    assert!(answered, "{said:?}");
    assert!(after.can_be_saved().is_ok());
}
