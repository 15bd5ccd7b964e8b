//! Windows between functions of one user, with lenders that note what is asked of them.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use rackbus_fabric::peer::Programmed;
use rackbus_memory::{Gate, SharedMemory};
use rackbus_pci::BarMemory;
use rackbus_pci::vfio_user::RegionShape;

use super::*;
use crate::remote::AbsentDevice;

const LONG: Duration = Duration::from_secs(30);

/// A lender that is told of what is closed.
struct Closed(mpsc::Sender<(u64, u64)>);

impl PeerWindows for Closed {
    fn open(
        &self,
        _iova: u64,
        _length: u64,
        _place: &BarPlace,
        _memory: &MemoryHandle,
    ) -> Result<(), String> {
        Ok(())
    }

    fn close(&self, iova: u64, length: u64) -> Result<(), String> {
        self.0.send((iova, length)).map_err(|error| error.to_string())
    }
}

/// A function with a BAR 2 of memory.
fn with_memory(memory: &SharedMemory) -> DeviceShape {
    let mut shape = DeviceShape::new(Vec::new(), 0, 0);
    let file = BarMemory::new(memory.descriptor().unwrap());
    let mappable = Some(SharedPart { memory: file, offset: 0, areas: vec![(0, 0x1000)] });
    shape.regions[2] = RegionShape { size: 0x1000, mappable };
    shape
}

fn looked_at(membership: &PeerMembership, bars: &[(u8, u64)]) {
    let bars = bars.iter().copied().collect();
    let mut state = membership.group.lock();
    state.peers.programmed(membership.member, Programmed { masters_bus: true, bars });
    state.unseen.remove(&membership.member);
    state.settle();
}

/// The lender of a function was lost while the node was restarted: nobody knows it any more, but others
/// still have windows to it.
#[test]
fn windows_that_another_process_opened_are_closed_when_they_are_not_to_be_any_more() {
    let memory = SharedMemory::create("bar", 0x1000).unwrap();
    let (sender, closed) = mpsc::channel();
    let groups = PeerGroups::default();
    let own = DeviceShape::new(Vec::new(), 0, 0);
    let drive = groups.join("db", "alpha/nvme0", &own, Some(Box::new(Closed(sender.clone()))));
    let here = (0x10_0000, 0x1000);
    let lost = (0x20_0000, 0x1000);
    drive.inherit(vec![here, lost]);
    let shape = with_memory(&memory);
    let target = groups.join("db", "gamma/ram0", &shape, Some(Box::new(Closed(sender))));
    target.inherit(Vec::new());
    assert_eq!(drive.windows(), [here, lost]);
    looked_at(&drive, &[]);
    assert_eq!(closed.try_iter().count(), 0, "not all were looked at");
    looked_at(&target, &[(2, here.0)]);
    assert_eq!(closed.try_iter().collect::<Vec<_>>(), [lost]);
    assert_eq!(drive.windows(), [here]);
}

/// It asks lenders: a process that took the conversations up meanwhile would find another's answers.
#[test]
fn a_node_is_not_replaced_while_windows_are_opened_again() {
    let (groups, gate) = (PeerGroups::default(), Gate::new().unwrap());
    let shape = DeviceShape::new(Vec::new(), 0, 0);
    let membership = Arc::new(groups.join("db", "alpha/nvme0", &shape, None));
    let group = membership.group.clone();
    // As if a lender took its time.
    let waits = group.lock();
    let followed = Followed::again(AbsentDevice(shape), membership, &groups, gate.clone());
    let begun = Instant::now();
    let busy = || gate.close(Duration::from_millis(10)).is_err();
    while !busy() {
        assert!(begun.elapsed() < LONG, "it is done outside of the gate");
    }
    drop(waits);
    drop(gate.close(LONG).expect("it has ended"));
    drop(followed);
}

/// A lender that is told of what is opened.
struct Told(mpsc::Sender<(u64, u64, BarPlace)>);

impl PeerWindows for Told {
    fn open(
        &self,
        iova: u64,
        length: u64,
        place: &BarPlace,
        _memory: &MemoryHandle,
    ) -> Result<(), String> {
        self.0.send((iova, length, place.clone())).map_err(|error| error.to_string())
    }

    fn close(&self, _iova: u64, _length: u64) -> Result<(), String> {
        Ok(())
    }
}

/// A lender may say of its function what it likes.
#[test]
fn nothing_beyond_a_bar_is_reached_whatever_its_lender_says() {
    let memory = SharedMemory::create("bar", 0x4000).unwrap();
    let mut shape = DeviceShape::new(Vec::new(), 0, 0);
    let file = BarMemory::new(memory.descriptor().unwrap());
    let areas = vec![(0, 0x1000), (0x1000, 0x4000), (u64::MAX, 2), (0x3000, 0x1000)];
    let mappable = Some(SharedPart { memory: file, offset: 0, areas });
    shape.regions[2] = RegionShape { size: 0x4000, mappable };
    let (sender, told) = mpsc::channel();
    let groups = PeerGroups::default();
    let own = DeviceShape::new(Vec::new(), 0, 0);
    let drive = groups.join("db", "alpha/nvme0", &own, Some(Box::new(Told(sender.clone()))));
    let target = groups.join("db", "gamma/ram0", &shape, Some(Box::new(Told(sender))));
    let program = |membership: &PeerMembership, masters_bus, bars: &[(u8, u64)]| {
        let bars = bars.iter().copied().collect();
        let mut state = membership.group.lock();
        state.peers.programmed(membership.member, Programmed { masters_bus, bars });
        state.settle();
    };
    program(&drive, true, &[]);
    program(&target, false, &[(2, 0x10_0000)]);
    let opened: Vec<_> =
        told.try_iter().map(|(at, length, place)| (at, length, place.offset)).collect();
    assert_eq!(opened, [(0x10_0000, 0x1000, 0), (0x10_3000, 0x1000, 0x3000)]);
    let reaches = |of: &str| groups.report().get(of).map_or(0, |report| report.reaches.len());
    assert_eq!((reaches("alpha/nvme0"), reaches("gamma/ram0")), (2, 0));
    drop(target);
    assert_eq!(reaches("alpha/nvme0"), 0);
}
