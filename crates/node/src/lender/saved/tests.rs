//! What becomes of functions that another process had and this one cannot go on with.

use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rackbus_control::api::DeviceReport;
use rackbus_devices::Folders;
use rackbus_devices::class::{LentTo, parse_rack};
use rackbus_fabric::{Fabric, FabricHandle, Lending, derive};
use rackbus_lease::{ArmedFor, LenderAction, Message};
use rackbus_link::shm::ShmLink;
use rackbus_memory::CarriedSession;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_pci::engine::EngineOptions;

use super::*;
use crate::handover::parcel;
use crate::lendable::{Attached, Modelled, NotReady};
use crate::lender::devices::OfferedFunctions;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.d0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n";

/// A function whose engine has stopped: there is nothing to save, and it begins anew each time. It keeps the levels that it
/// was given since then, and refuses others than numbers.
#[derive(Debug, Default)]
struct Stopped(Mutex<Vec<(Option<String>, LentTo)>>);

impl Stopped {
    fn levels(&self) -> Vec<(Option<String>, LentTo)> {
        self.0.lock().unwrap().clone()
    }
}

impl Lendable for Stopped {
    fn arm(&self, _limit: Duration) -> Result<(), NotReady> {
        self.0.lock().unwrap().clear();
        Ok(())
    }

    fn set_level(&self, level: Option<&str>, to: LentTo) -> Result<(), String> {
        self.0.lock().unwrap().push((level.map(str::to_owned), to));
        Ok(())
    }

    fn resume_level(&self, level: Option<&str>, to: LentTo) -> Result<(), String> {
        match level {
            Some(level) if level.parse::<u32>().is_err() => Err(format!("no such level: {level}")),
            level => self.set_level(level, to),
        }
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

/// A lender of d0, which beta has by its first lease with a level, and is attached to.
fn lent_to_beta(level: Option<&str>) -> LentFunctions {
    lent_in(Placement::Lender, level)
}

/// The same, with the front at this place.
fn lent_in(placement: Placement, level: Option<&str>) -> LentFunctions {
    let (lender, holder) = armed(Arc::new(Stopped::default()), placement, level);
    lender.fence.lock().attach("d0", &holder).unwrap();
    lender
}

/// The same of this function, before beta attaches.
fn armed(
    function: Arc<dyn Lendable>,
    placement: Placement,
    level: Option<&str>,
) -> (LentFunctions, ArmedFor) {
    let lender = lender();
    lender.add("d0", function).unwrap();
    let (device, borrower) = ("d0".to_owned(), "beta".to_owned());
    let (lease, epoch) = (1, 1);
    let holder = ArmedFor { lease, epoch, borrower: borrower.clone(), placement };
    let asked = level.map(str::to_owned);
    let arm = Message::Arm {
        incarnation: 0,
        device,
        lease,
        epoch,
        borrower,
        placement,
        level: asked,
        serve_for: None,
    };
    assert_eq!(lender.receive(0, arm).len(), 1);
    lender.arm("d0", epoch, level);
    (lender, holder)
}

/// The lender in the place of `before`, where these devices can be made, and these states are passed on beside.
fn successor(
    before: &LentFunctions,
    devices: &[(String, Arc<dyn Lendable>)],
    states: BTreeMap<String, LentState>,
) -> LentFunctions {
    succeed(before, |after| after, devices, states)
}

/// The same lender, made `with` something more.
fn succeed(
    before: &LentFunctions,
    with: impl FnOnce(LentFunctions) -> LentFunctions,
    devices: &[(String, Arc<dyn Lendable>)],
    states: BTreeMap<String, LentState>,
) -> LentFunctions {
    let mut saved = before.save(&mut Parcel::default()).unwrap();
    assert!(saved.states.is_empty());
    let levels = std::mem::take(&mut saved.levels);
    let after = with(lender()).with_fence(before.fence());
    let folder = tempfile::tempdir().unwrap();
    let link = ShmLink::new("test", folder.path(), ["alpha", "beta"]);
    let mut descriptors = ParcelDescriptors::default();
    assert!(after.resume_all(devices, states, levels, &mut descriptors, &link).is_empty());
    after
}

/// The new program does not know its description. Its revocation would go on for ever, and no later restart in place
/// would be possible.
#[test]
fn a_function_that_the_successor_cannot_make_is_taken_back_all_the_same() {
    let before = lent_to_beta(None);
    let after = successor(&before, &[], BTreeMap::new());
    let revoke = Message::Revoke { incarnation: 0, device: "d0".to_owned(), epoch: 1 };
    assert_eq!(after.receive(0, revoke).len(), 1);
    let said = after.revoke("d0", 1).unwrap();
    let answered = matches!(said[..], [LenderAction::Send(Message::Revoked { epoch: 1, .. })]);
    assert!(answered, "{said:?}");
    assert!(after.can_be_saved().is_ok());
}

/// Its lease goes on, and the control plane counts on what it was promised.
#[test]
fn a_function_that_begins_anew_keeps_the_level_of_its_lease() {
    let mut before = lent_to_beta(Some("10"));
    for _ in 0..2 {
        let function = Arc::new(Stopped::default());
        let devices = [("d0".to_owned(), function.clone() as Arc<dyn Lendable>)];
        let after = successor(&before, &devices, BTreeMap::new());
        assert_eq!(function.levels(), [(Some("10".to_owned()), LentTo::Borrower)]);
        assert_eq!(after.find("d0").unwrap().promised().as_deref(), Some("10"));
        // And once more, without a user that attached meanwhile.
        before = after;
    }
}

/// Nothing is promised then, and its borrower attaches with a share of what is left.
#[test]
fn a_level_that_cannot_be_kept_is_given_up_by_a_function_that_begins_anew() {
    let before = lent_to_beta(Some("much"));
    let function = Arc::new(Stopped::default());
    let devices = [("d0".to_owned(), function.clone() as Arc<dyn Lendable>)];
    let after = successor(&before, &devices, BTreeMap::new());
    assert!(function.levels().is_empty());
    assert_eq!(*after.find("d0").unwrap().promised(), None);
}

/// Programs up to version 5 wrote the level in the function's state, which cannot be gone on with here.
#[test]
fn a_function_whose_state_is_refused_keeps_the_level_that_is_written_in_it() {
    let before = lent_to_beta(None);
    let text = r#"{"d0": {"function": {"session": {}, "descriptors": [], "medium": []},
                   "conversation": null, "level": "10"}}"#;
    let function = Arc::new(Stopped::default());
    let devices = [("d0".to_owned(), function.clone() as Arc<dyn Lendable>)];
    let after = successor(&before, &devices, serde_json::from_str(text).unwrap());
    assert_eq!(function.levels(), [(Some("10".to_owned()), LentTo::Borrower)]);
    assert_eq!(after.find("d0").unwrap().promised().as_deref(), Some("10"));
}

/// Before anything pauses. On one machine its conversation has a socket, which is passed on; between machines it is a session, or
/// a connection that no other process can have.
#[test]
fn a_function_whose_conversation_cannot_be_passed_on_keeps_its_lender_from_being_restarted() {
    let refused = |stream: Arc<dyn Stream>| {
        let lender = lent_in(Placement::Host, None);
        let lent = lender.find("d0").unwrap();
        lent.lock().session = Some(InUse { stream, session: None, at: None });
        lender.can_be_saved().err().map(|error| error.to_string())
    };
    assert_eq!(refused(Arc::new(UnixStream::pair().unwrap().0)), None);
    let connection = CarriedSession::of_one_connection(SessionSide::Answers).unwrap();
    let said = "alpha/d0 would be lost: its borrower's node knows no sessions for functions in its own PCI tree";
    assert_eq!(refused(Arc::new(connection)).as_deref(), Some(said));
}

/// A drive in memory, and how often it was made without anything in it.
fn drive() -> (Arc<Modelled>, Arc<AtomicUsize>) {
    let rack = RACK.replace("\"1 MiB\"", "\"1 MiB\"\nbacking = \"memory\"");
    let (_, devices) = parse_rack("rack.toml", &rack).unwrap();
    let config = devices[0].config.clone().unwrap();
    let (again, made) = (config.clone(), Arc::<AtomicUsize>::default());
    let count = made.clone();
    let folders = || Folders::new("/nonexistent", "/nonexistent");
    let factory = Box::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
        config.model(&folders())
    });
    let modelled = Modelled::new("d0", factory, EngineOptions::default());
    let successor = Box::new(move |medium| again.resume(&folders(), medium));
    (Arc::new(modelled.with_successor(successor)), made)
}

/// It has what its borrower wrote before, and may be the only copy.
#[test]
fn a_drive_in_memory_is_kept_while_its_borrower_is_away_wherever_its_front_is() {
    for placement in [Placement::Lender, Placement::Borrower, Placement::Host] {
        let (before, _) = armed(drive().0, placement, None);
        let mut parcel = Parcel::default();
        let mut saved = before.save(&mut parcel).unwrap();
        let states = serde_json::to_vec(&std::mem::take(&mut saved.states)).unwrap();
        let (states, mut descriptors) = parcel::receive(parcel.send(&states).unwrap()).unwrap();
        let states = serde_json::from_slice(&states).unwrap();
        let after = lender().with_fence(before.fence());
        let folder = tempfile::tempdir().unwrap();
        let link = ShmLink::new("test", folder.path(), ["alpha", "beta"]);
        let (next, made) = drive();
        let devices = [("d0".to_owned(), next.clone() as Arc<dyn Lendable>)];
        let levels = BTreeMap::new();
        let users = after.resume_all(&devices, states, levels, &mut descriptors, &link);
        assert!(users.is_empty(), "{placement}");
        next.arm(Duration::from_secs(60)).unwrap();
        assert_eq!(made.load(Ordering::Relaxed), 0, "{placement}: it begins anew");
    }
}

/// As a rack file that was edited has it done: it is withdrawn as it was, and offered as it is now.
fn offer_again(lender: &LentFunctions, listed_before: bool) {
    let (device, functions) = ("d0".to_owned(), vec!["d0".to_owned()]);
    if listed_before {
        let (device, functions) = (device.clone(), functions.clone());
        let withdraw = Message::Withdraw { incarnation: 0, device, number: 1, functions };
        assert_eq!(lender.receive(0, withdraw).len(), 1);
        lender.release("d0", 1, &["d0".to_owned()]);
    }
    let section = "size = \"2 MiB\"".to_owned();
    let offer = Message::Offer { incarnation: 0, device, number: 2, functions, section };
    for action in lender.receive(0, offer) {
        if let LenderAction::Offer { device, number, section } = action {
            lender.take_on(&device, number, &section);
        }
    }
}

/// Whether the lender has this one by the name of d0.
fn has(lender: &LentFunctions, function: &Arc<Stopped>) -> bool {
    let found = lender.find("d0").unwrap();
    std::ptr::addr_eq(Arc::as_ptr(&found.lendable), Arc::as_ptr(function))
}

#[test]
fn a_device_that_was_taken_on_stays_as_it_was_offered() {
    for listed_before in [true, false] {
        let (listed, offered) = (Arc::new(Stopped::default()), Arc::new(Stopped::default()));
        let makes = |offered: &Arc<Stopped>| -> OfferedFunctions {
            let offered = offered.clone();
            Arc::new(move |_, _| Ok(vec![("d0".to_owned(), offered.clone() as Arc<dyn Lendable>)]))
        };
        let before = lender().with_offers(makes(&Arc::default()));
        if listed_before {
            before.add("d0", Arc::new(Stopped::default())).unwrap();
        }
        offer_again(&before, listed_before);
        let devices = [("d0".to_owned(), listed.clone() as Arc<dyn Lendable>)];
        let maker = makes(&offered);
        let after = succeed(&before, |after| after.with_offers(maker), &devices, BTreeMap::new());
        assert!(has(&after, &offered), "listed before: {listed_before}");
        // The one of the rack file is not lent in its place where the offer is refused.
        let after = successor(&before, &devices, BTreeMap::new());
        assert!(after.devices().is_empty(), "listed before: {listed_before}");
    }
}

/// A control plane that lost its records offers what the node had from the rack file. It keeps that.
#[test]
fn a_device_that_was_there_when_it_was_offered_stays_as_the_rack_file_has_it() {
    let before = lender();
    before.add("d0", Arc::new(Stopped::default())).unwrap();
    offer_again(&before, false);
    let listed = Arc::new(Stopped::default());
    let devices = [("d0".to_owned(), listed.clone() as Arc<dyn Lendable>)];
    let refused: OfferedFunctions = Arc::new(|_, _| Err("it is not asked for".to_owned()));
    let after = succeed(&before, |after| after.with_offers(refused), &devices, BTreeMap::new());
    assert!(has(&after, &listed));
}
