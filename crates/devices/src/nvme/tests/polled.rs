//! Registers as memory: a driver that only loads and stores, and one that stores anything.

use proptest::prelude::*;
use rackbus_pci::{NotPolled, PolledRegisters, Work};
use rackbus_spec::nvme::registers::{Cmbmsc, SHN_NORMAL, SHST_COMPLETE};

use std::sync::{Arc, Mutex};

use rackbus_pci::{FunctionState, RestoreError};

use super::background::{BackgroundControl, slow_drive};
use super::succession::finish;
use super::*;

/// A host whose drive has its registers in memory, not enabled yet.
fn host() -> TestHost {
    with_registers(TestHost::plain(&NvmeConfig::memory(1 << 20, "TEST")))
}

fn with_registers(mut host: TestHost) -> TestHost {
    let (file, length) = host.endpoint.poll_registers(0).unwrap();
    host.registers = Some(PolledRegisters::adopt(file, length).unwrap());
    host
}

fn write_and_read(host: &mut TestHost, lba: u64, byte: u8) {
    let buffer = host.pages(1);
    host.poke(buffer, &[byte; 4096]);
    let command = transfer(IoOpcode::Write, lba, 4096, buffer);
    assert_eq!(host.run(1, command).status(), Status::SUCCESS);
    host.poke(buffer, &[0; 4096]);
    let command = transfer(IoOpcode::Read, lba, 4096, buffer);
    assert_eq!(host.run(1, command).status(), Status::SUCCESS);
    assert_eq!(host.peek(buffer, 4096), [byte; 4096]);
}

#[test]
fn a_driver_that_only_loads_and_stores_uses_the_drive() {
    let mut host = host();
    assert_eq!(host.read4(reg::VS), rackbus_spec::nvme::VERSION_1_4);
    host.enable();
    host.create_pair(1, ENTRIES);
    // More than the rings hold: both doorbells wrap, and the drive waits for room again and again.
    for turn in 0..3 * u64::from(ENTRIES) {
        write_and_read(&mut host, turn % 200, turn as u8 + 1);
        host.next_page -= 4096;
    }
    // The same by messages: both show the same registers.
    let mut trapped = [0; 4];
    host.endpoint.read(FunctionRegion::Bar(0), reg::CSTS, &mut trapped).unwrap();
    assert_eq!(u32::from_le_bytes(trapped), host.read4(reg::CSTS));
}

#[test]
fn a_controller_that_is_enabled_again_has_new_queues_and_doorbells_at_zero() {
    let mut host = host();
    for turn in 1..4 {
        host.enable();
        host.create_pair(1, ENTRIES);
        assert_eq!(host.read4(reg::sq_tail_doorbell(1, DOORBELL_STRIDE)), 0);
        for lba in 0..turn {
            write_and_read(&mut host, lba, turn as u8);
        }
        host.write4(reg::CC, 0);
        host.poll();
        assert!(!host.csts().rdy());
    }
}

#[test]
fn a_shutdown_is_told_in_memory() {
    let mut host = host();
    host.enable();
    host.create_pair(1, ENTRIES);
    write_and_read(&mut host, 0, 7);
    let cc = Cc::from(host.read4(reg::CC)).with_shn(SHN_NORMAL);
    host.write4(reg::CC, cc.into());
    while host.csts().shst() != SHST_COMPLETE {
        host.poll();
    }
}

#[test]
fn the_admin_queue_stays_where_it_was_when_the_controller_was_enabled() {
    let mut host = host();
    host.enable();
    host.create_pair(1, ENTRIES);
    for register in [reg::AQA, reg::ASQ, reg::ASQ + 4, reg::ACQ, reg::ACQ + 4] {
        host.write4(register, 0xffff_ffff);
    }
    // With another bit of CC, so that it is looked at.
    let cc = Cc::from(host.read4(reg::CC)).with_iocqes(4).with_ams(0);
    host.write4(reg::CC, u32::from(cc) | 1 << 31);
    host.poll();
    write_and_read(&mut host, 3, 9);
    host.create_pair(2, ENTRIES);
}

/// Section 3.1.16: what there is shows when the driver asks for it, and is where the driver puts it.
#[test]
fn a_memory_buffer_is_placed_by_registers_in_memory() {
    const AT: u64 = 0x40_0000_0000;
    let config = NvmeConfig { buffer: 64 << 10, ..NvmeConfig::memory(1 << 20, "TEST") };
    let mut host = with_registers(TestHost::plain(&config));
    host.enable();
    host.create_pair(1, ENTRIES);
    assert_eq!(host.read4(reg::CMBSZ), 0);
    let control = u64::from(Cmbmsc::new().with_cre(true).with_cmse(true).with_cba(AT >> 12));
    host.write4(reg::CMBMSC, control as u32);
    // The halves are two stores: the drive may see the first one alone.
    host.poll();
    host.write4(reg::CMBMSC + 4, (control >> 32) as u32);
    host.poll();
    assert_ne!(host.read4(reg::CMBSZ), 0);
    assert_eq!(host.read4(reg::CMBMSC + 4), (AT >> 32) as u32);
    write_and_read(&mut host, 8, 0x5a);
    assert_eq!(host.status(1, transfer(IoOpcode::Read, 8, 4096, AT + 8192)), Status::SUCCESS);
    let mut bytes = [0; 4096];
    host.endpoint.read(FunctionRegion::Bar(2), 8192, &mut bytes).unwrap();
    assert_eq!(bytes, [0x5a; 4096]);
    host.write4(reg::CMBMSC, 0);
    host.poll();
    assert_eq!(host.read4(reg::CMBSZ), 0);
    assert_ne!(host.status(1, transfer(IoOpcode::Read, 8, 4096, AT + 8192)), Status::SUCCESS);
}

#[test]
fn an_idle_drive_looks_from_time_to_time() {
    let mut host = host();
    let Work::Watch(before) = host.poll() else { panic!("nobody rings") };
    host.enable();
    host.create_pair(1, ENTRIES);
    while host.poll() == Work::Done {}
    host.now += 1_000_000_000;
    let Work::Watch(later) = host.poll() else { panic!("nobody rings") };
    assert!(before < later && later <= 2_000_000, "{before} {later}");
    write_and_read(&mut host, 1, 1);
    while host.poll() == Work::Done {}
    let Work::Watch(soon) = host.poll() else { panic!("nobody rings") };
    assert!(soon < later, "{soon} {later}");
}

#[test]
fn a_former_user_finds_a_device_that_was_pulled_out() {
    let mut host = host();
    host.enable();
    host.create_pair(1, ENTRIES);
    write_and_read(&mut host, 0, 1);
    let former = host.registers.take().unwrap();
    host.endpoint.scrub();
    assert_eq!((former.load(reg::CSTS), former.load(reg::CC)), (u32::MAX, u32::MAX));
    let mut next = with_registers(TestHost::with_endpoint(host.endpoint, host.ram));
    // What the former one stores reaches nobody.
    former.store(reg::CC, 1);
    assert_eq!(next.poll(), Work::Watch(20_000));
    assert!(!next.csts().rdy());
    assert_eq!(next.read4(reg::CC), 0);
    next.enable();
    next.create_pair(1, ENTRIES);
    former.store(reg::sq_tail_doorbell(1, DOORBELL_STRIDE), 5);
    write_and_read(&mut next, 0, 2);
}

/// A drive whose medium waits to be told, its registers in memory, with a write under way.
fn busy() -> (TestHost, Arc<Mutex<BackgroundControl>>, u64, u16) {
    let (nvme, control) = slow_drive();
    let mut host = with_registers(TestHost::around(nvme));
    host.enable();
    host.create_pair(1, ENTRIES);
    let page = host.pages(1);
    host.poke(page, &[7; 4096]);
    let write = host.submit(1, transfer(IoOpcode::Write, 3, 512, page));
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 1);
    (host, control, page, write)
}

#[test]
fn a_driver_that_only_loads_and_stores_notices_nothing_when_another_process_goes_on() {
    let (mut host, control, page, write) = busy();
    let saved = host.endpoint.save().unwrap();
    // Its doorbell is stored while nobody looks.
    let read = host.submit(1, transfer(IoOpcode::Read, 3, 512, page));
    host.poll();
    let (next, medium) = slow_drive();
    medium.lock().unwrap().data = control.lock().unwrap().data.clone();
    let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
    let mut next = Endpoint::new(Box::new(next));
    next.restore(&state, saved.descriptors).unwrap();
    // The life before ends, and what its driver has mapped is not taken away by that.
    drop(std::mem::replace(&mut host.endpoint, next));
    assert!(host.csts().rdy());
    finish(&mut host, &medium);
    let ended = [host.take_completion(1).unwrap(), host.take_completion(1).unwrap()];
    assert_eq!(ended.map(|cqe| cqe.status()), [Status::SUCCESS; 2]);
    let mut cids = ended.map(|cqe| cqe.cid);
    cids.sort_unstable();
    assert_eq!(cids, [write, read]);
    assert_eq!(host.take_completion(1), None);
    // A reset is stored as before, and is told.
    host.write4(reg::CC, 0);
    host.poll();
    assert!(!host.csts().rdy());
}

#[test]
fn registers_of_a_drive_that_is_taken_back_are_looked_at_again() {
    let (mut host, control, page, _) = busy();
    let saved = host.endpoint.save().unwrap();
    let read = host.submit(1, transfer(IoOpcode::Read, 3, 512, page));
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 1, "it is looked at while it is saved");
    host.endpoint.take_back(saved).unwrap();
    finish(&mut host, &control);
    assert!(std::iter::from_fn(|| host.take_completion(1)).any(|cqe| cqe.cid == read));
    // Whoever loses it meanwhile finds a device that was pulled out.
    let saved = host.endpoint.save().unwrap();
    let registers = host.registers.take().unwrap();
    host.endpoint.retire_registers();
    assert_eq!(registers.load(reg::CSTS), u32::MAX);
    host.endpoint.take_back(saved).unwrap();
    host.endpoint.poll(host.now);
    assert_eq!(registers.load(reg::CSTS), u32::MAX);
}

/// The memory of another function, or of one whose registers are elsewhere.
#[test]
fn registers_that_are_not_the_drives_are_not_gone_on_with() {
    let (mut host, ..) = busy();
    let saved = host.endpoint.save().unwrap();
    let mut value: serde_json::Value =
        serde_json::from_slice(&saved.state.to_bytes().unwrap()).unwrap();
    value["registers"]["watched"]["mark"] = 0x1c.into();
    let state = FunctionState::from_bytes(&serde_json::to_vec(&value).unwrap()).unwrap();
    let mut next = Endpoint::new(Box::new(slow_drive().0));
    let refused = next.restore(&state, saved.descriptors).unwrap_err();
    assert!(matches!(refused, RestoreError::Registers(NotPolled::State)), "{refused}");
}

#[test]
fn a_function_level_reset_shows_in_memory() {
    let mut host = host();
    host.enable();
    host.endpoint.reset();
    assert_eq!((host.read4(reg::CC), host.read4(reg::CSTS), host.read4(reg::AQA)), (0, 0, 0));
    host.command_register(0b110);
    host.enable();
    host.create_pair(1, ENTRIES);
    write_and_read(&mut host, 0, 1);
}

#[test]
fn registers_are_those_of_bar_0_of_a_front_that_runs_here() {
    let mut host = TestHost::plain(&NvmeConfig::memory(1 << 20, "TEST"));
    assert!(matches!(host.endpoint.poll_registers(2), Err(NotPolled::Bar(2))));
    let once = host.endpoint.poll_registers(0).unwrap();
    let again = host.endpoint.poll_registers(0).unwrap();
    let [once, again] =
        [once, again].map(|(file, size)| PolledRegisters::adopt(file, size).unwrap());
    once.store(reg::INTMS, 3);
    assert_eq!(again.load(reg::INTMS), 3);
    host.endpoint.scrub();
    host.endpoint.serve_medium(None).unwrap();
    assert!(matches!(host.endpoint.poll_registers(0), Err(NotPolled::Elsewhere)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is stored, whenever: nothing fails but the user's own drive, nothing is written outside of the
    /// memory that the drive was given, and a reset makes it usable.
    #[test]
    fn whatever_a_driver_stores_is_the_drivers_own_trouble(
        stores in prop::collection::vec(
            (
                prop_oneof![(0u64..16).prop_map(|word| 4 * word), (0u64..130).prop_map(|nth| 0x1000 + 32 * nth)],
                prop_oneof![any::<u32>(), 0u32..20, Just(0x0046_0001), Just(0x0046_4001)],
                any::<bool>(),
            ),
            1..200,
        )
    ) {
        let mut host = host();
        host.enable();
        host.create_pair(1, ENTRIES);
        for (register, value, poll) in stores {
            host.write4(register, value);
            if poll {
                host.poll();
            }
        }
        for _ in 0..10 {
            host.poll();
        }
        host.endpoint.reset();
        host.command_register(0b110);
        host.enable();
        host.create_pair(1, ENTRIES);
        write_and_read(&mut host, 0, 1);
    }
}

/// The borrower's node retires them before the lender's engine has stopped.
#[test]
fn registers_that_were_retired_stay_so_while_the_drive_goes_on() {
    for is_enabled in [false, true] {
        let mut host = host();
        if is_enabled {
            host.enable();
        }
        host.registers.as_ref().unwrap().retire();
        for _ in 0..3 {
            host.poll();
        }
        let registers = host.registers.as_ref().unwrap();
        let all = [reg::CAP, reg::CC, reg::CSTS, reg::AQA].map(|at| registers.load(at));
        assert_eq!(all, [u32::MAX; 4], "enabled: {is_enabled}");
    }
}
