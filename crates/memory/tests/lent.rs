//! A process that lends memory of its own and has no room to take it back: in a process of its
//! own, because the room is taken from all of it.
#![cfg(not(loom))]

use std::os::fd::AsFd;
use std::process::Command;

use rackbus_memory::{Access, HandleRef, Region, SharedMemory};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LENGTH: usize = 32 << 20;

/// The child's side; nothing when no parent has started it.
#[test]
fn one_without_room() {
    if std::env::var_os("RACKBUS_TEST_NO_ROOM").is_none() {
        return;
    }
    let room = Region::reserve(LENGTH as u64, Access::READ | Access::WRITE).unwrap();
    room.whole().write_obj(LENGTH - 8, &7_u64).unwrap();
    let address = room.whole().as_ptr() as usize;
    std::mem::forget(room);
    let file = SharedMemory::reserve("lent", LENGTH as u64).unwrap();
    // SAFETY: the range was reserved above and forgotten.
    let lent =
        unsafe { Region::map_over(address, HandleRef::of_descriptor(file.as_fd()), LENGTH as u64) }
            .unwrap();
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(1 << 20), maximum: before.maximum }).unwrap();
    drop(lent);
    setrlimit(Resource::As, before).unwrap();
    // SAFETY: the memory is the program's own, whoever else has it.
    unsafe {
        let last = (address + LENGTH - 8) as *mut u64;
        assert_eq!(last.read_volatile(), 7);
        last.write_volatile(8);
        assert_eq!(last.read_volatile(), 8);
    }
}

#[test]
fn memory_that_cannot_be_taken_back_is_still_there() {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["one_without_room", "--exact"])
        .env("RACKBUS_TEST_NO_ROOM", "1")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
