//! Admin commands: what a driver does to bring the controller up, and every way to get it wrong.

use rackbus_pci::Work;
use rackbus_spec::nvme::command::{AbortCdw10, FeaturesCdw10, LogCdw10};
use rackbus_spec::nvme::features::{
    self as fid, AsyncEvent, AsyncEventConfig, TemperatureThreshold,
};
use rackbus_spec::nvme::identify::{IdentifyController, IdentifyNamespace};
use rackbus_spec::nvme::log::{self, CommandsSupported, ErrorEntry, SmartHealth};
use rackbus_spec::nvme::registers::{SHN_NORMAL, SHST_COMPLETE, SHST_NORMAL};
use rackbus_spec::nvme::{NSID_ALL, VERSION_1_4};
use zerocopy::FromBytes;

use super::super::events::REQUEST_LIMIT;
use super::super::features::IO_QUEUES;
use super::super::interrupts::VECTORS;
use super::super::registers::MAX_QUEUE_ENTRIES;
use super::*;

fn identify(host: &mut TestHost, cns: u32, nsid: u32) -> Result<Vec<u8>, Status> {
    let buffer = host.scratch();
    let status = host.status(0, admin_data(AdminOpcode::Identify, nsid, cns, buffer));
    if status.is_success() { Ok(host.peek(buffer, 4096)) } else { Err(status) }
}

fn get_log(host: &mut TestHost, lid: u8, dwords: u16, offset: u64) -> Result<Vec<u8>, Status> {
    let buffer = host.scratch();
    let cdw10 = LogCdw10::new().with_lid(lid).with_numdl(dwords - 1);
    let mut sqe = admin_data(AdminOpcode::GetLogPage, NSID_ALL, cdw10.into(), buffer);
    sqe.cdw12 = offset as u32;
    sqe.cdw13 = (offset >> 32) as u32;
    let status = host.status(0, sqe);
    if status.is_success() { Ok(host.peek(buffer, usize::from(dwords) * 4)) } else { Err(status) }
}

fn feature(opcode: AdminOpcode, fid: u8, sel: u8, value: u32) -> Sqe {
    let mut sqe = admin(opcode);
    sqe.cdw10 = FeaturesCdw10::new().with_fid(fid).with_sel(sel).into();
    sqe.cdw11 = value;
    sqe
}

fn set(host: &mut TestHost, fid: u8, value: u32) -> Status {
    host.status(0, feature(AdminOpcode::SetFeatures, fid, 0, value))
}

fn create_cq(qid: u16, entries: u32, vector: u16, base: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CreateCq);
    sqe.cdw10 = (entries - 1) << 16 | u32::from(qid);
    sqe.cdw11 = u32::from(vector) << 16 | 0b11;
    sqe.dptr[0] = base;
    sqe
}

fn create_sq(qid: u16, entries: u32, cqid: u16, base: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CreateSq);
    sqe.cdw10 = (entries - 1) << 16 | u32::from(qid);
    sqe.cdw11 = u32::from(cqid) << 16 | 1;
    sqe.dptr[0] = base;
    sqe
}

fn delete(opcode: AdminOpcode, qid: u16) -> Sqe {
    Sqe { cdw10: u32::from(qid), ..admin(opcode) }
}

#[test]
fn identify_describes_the_drive() {
    let mut host = TestHost::with_memory(1 << 20);
    let controller = identify(&mut host, 1, 0).unwrap();
    let controller = IdentifyController::ref_from_bytes(&controller).unwrap();
    assert_eq!({ controller.ver }, VERSION_1_4);
    assert_eq!(&controller.sn, b"TEST                ");
    assert_eq!((controller.sqes, controller.cqes, { controller.nn }), (0x66, 0x44, 1));
    let namespace = identify(&mut host, 0, 1).unwrap();
    let namespace = IdentifyNamespace::ref_from_bytes(&namespace).unwrap();
    assert_eq!(({ namespace.nsze }, namespace.lbaf[0].lbads), (2048, 9));
    assert_eq!(identify(&mut host, 2, 0).unwrap()[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(identify(&mut host, 2, 1).unwrap()[..4], [0; 4]);
    assert_eq!(identify(&mut host, 3, 1).unwrap()[..2], [3, 16]);
    assert_eq!(identify(&mut host, 0, 2), Err(Status::INVALID_NAMESPACE));
    assert_eq!(identify(&mut host, 0, NSID_ALL), Err(Status::INVALID_NAMESPACE));
    assert_eq!(identify(&mut host, 3, 0), Err(Status::INVALID_NAMESPACE));
    assert_eq!(identify(&mut host, 2, NSID_ALL), Err(Status::INVALID_NAMESPACE));
    assert_eq!(identify(&mut host, 0x13, 0), Err(Status::INVALID_FIELD));
}

#[test]
fn queues_are_created_and_deleted_by_the_rules() {
    let mut host = TestHost::with_memory(1 << 20);
    let (a, b) = (host.pages(1), host.pages(1));
    let unaligned = create_cq(2, 8, 2, a + 64);
    let mut scattered = create_cq(2, 8, 2, a);
    scattered.cdw11 &= !1;
    let wrong = [
        (create_cq(0, 8, 2, a), Status::INVALID_QUEUE_ID),
        (create_cq(IO_QUEUES + 1, 8, 2, a), Status::INVALID_QUEUE_ID),
        (create_cq(1, 8, 2, a), Status::INVALID_QUEUE_ID),
        (create_cq(2, 1, 2, a), Status::INVALID_QUEUE_SIZE),
        (create_cq(2, u32::from(MAX_QUEUE_ENTRIES) + 1, 2, a), Status::INVALID_QUEUE_SIZE),
        (create_cq(2, 8, VECTORS, a), Status::INVALID_INTERRUPT_VECTOR),
        (create_cq(2, 8, 2, 0x7000), Status::DATA_TRANSFER_ERROR),
        (create_cq(2, 8, 2, !4095), Status::DATA_TRANSFER_ERROR),
        (unaligned, Status::PRP_OFFSET_INVALID),
        (scattered, Status::INVALID_FIELD),
        (create_sq(2, 8, 2, b), Status::COMPLETION_QUEUE_INVALID),
        (create_sq(2, 8, 0, b), Status::INVALID_QUEUE_ID),
        (create_sq(2, 8, 99, b), Status::INVALID_QUEUE_ID),
        (create_sq(1, 8, 1, b), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DeleteCq, 1), Status::INVALID_QUEUE_DELETION),
        (delete(AdminOpcode::DeleteCq, 0), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DeleteSq, 0), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DeleteSq, 5), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DeleteCq, 999), Status::INVALID_QUEUE_ID),
    ];
    for (sqe, status) in wrong {
        assert_eq!(host.status(0, sqe), status, "{sqe:?}");
    }
    assert_eq!(host.status(0, create_cq(2, 8, 2, a)), Status::SUCCESS);
    // Two submission queues on one completion queue.
    assert_eq!(host.status(0, create_sq(2, 8, 2, b)), Status::SUCCESS);
    assert_eq!(host.status(0, create_sq(3, 8, 2, b)), Status::SUCCESS);
    for (sqe, status) in [
        (delete(AdminOpcode::DeleteSq, 2), Status::SUCCESS),
        (delete(AdminOpcode::DeleteCq, 2), Status::INVALID_QUEUE_DELETION),
        (delete(AdminOpcode::DeleteSq, 3), Status::SUCCESS),
        (delete(AdminOpcode::DeleteCq, 2), Status::SUCCESS),
    ] {
        assert_eq!(host.status(0, sqe), status, "{sqe:?}");
    }
}

#[test]
fn all_the_queues_that_are_granted_work() {
    let mut host = TestHost::with_memory(1 << 20);
    for qid in 2..=IO_QUEUES {
        host.create_pair(qid, ENTRIES);
    }
    let buffer = host.scratch();
    for qid in 1..=IO_QUEUES {
        let sqe = transfer(IoOpcode::Read, u64::from(qid), 512, buffer);
        assert_eq!(host.status(qid, sqe), Status::SUCCESS);
    }
}

#[test]
fn features_have_current_default_saved_and_supported_values() {
    let mut host = TestHost::with_memory(1 << 20);
    let coalescing = fid::INTERRUPT_COALESCING;
    assert_eq!(set(&mut host, coalescing, 0x0203), Status::SUCCESS);
    for (sel, value) in [(0, 0x0203), (1, 0), (2, 0), (3, 0b100)] {
        let cqe = host.run(0, feature(AdminOpcode::GetFeatures, coalescing, sel, 0));
        assert_eq!((cqe.status(), cqe.dw0), (Status::SUCCESS, value), "select {sel}");
    }
    let mut save = feature(AdminOpcode::SetFeatures, coalescing, 0, 0);
    save.cdw10 |= 1 << 31;
    assert_eq!(host.status(0, save), Status::FEATURE_NOT_SAVEABLE);
    let mut of_namespace = feature(AdminOpcode::SetFeatures, coalescing, 0, 0);
    of_namespace.nsid = 1;
    assert_eq!(host.status(0, of_namespace), Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    let get = |fid, sel| feature(AdminOpcode::GetFeatures, fid, sel, 0);
    assert_eq!(host.status(0, get(0x7f, 0)), Status::INVALID_FIELD);
    assert_eq!(host.status(0, get(coalescing, 5)), Status::INVALID_FIELD);
    // Memory has no volatile cache, so there is none to turn off.
    assert_eq!(set(&mut host, fid::VOLATILE_WRITE_CACHE, 0), Status::INVALID_FIELD);
    // Queues exist already.
    assert_eq!(set(&mut host, fid::NUMBER_OF_QUEUES, 0), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn the_host_identifier_is_kept_until_the_drive_is_scrubbed() {
    let mut host = TestHost::with_memory(1 << 20);
    let buffer = host.scratch();
    let sqe = |opcode| {
        let mut sqe = admin_data(opcode, 0, u32::from(fid::HOST_IDENTIFIER), buffer);
        sqe.cdw11 = 1;
        sqe
    };
    host.poke(buffer, b"0123456789abcdef");
    assert_eq!(host.status(0, sqe(AdminOpcode::SetFeatures)), Status::SUCCESS);
    host.poke(buffer, &[0; 16]);
    assert_eq!(host.status(0, sqe(AdminOpcode::GetFeatures)), Status::SUCCESS);
    assert_eq!(host.peek(buffer, 16), b"0123456789abcdef");
}

#[test]
fn logs_record_what_happened() {
    let mut host = TestHost::with_memory(1 << 20);
    let buffer = host.scratch();
    host.write_blocks(0, &[1; 4096]);
    let beyond = transfer(IoOpcode::Read, 5000, 512, buffer);
    let cqe = host.run(1, beyond);
    assert_eq!(cqe.status(), Status::LBA_OUT_OF_RANGE.do_not_retry().more());
    let errors = get_log(&mut host, log::ERROR_INFORMATION, 32, 0).unwrap();
    let entry = ErrorEntry::read_from_prefix(&errors).unwrap().0;
    assert_eq!(({ entry.error_count }, { entry.sq_id }, { entry.lba }), (1, 1, 5000));
    assert_eq!({ entry.cid }, cqe.cid);
    let smart = get_log(&mut host, log::SMART_HEALTH, 128, 0).unwrap();
    let smart = SmartHealth::read_from_bytes(&smart).unwrap();
    assert_eq!(({ smart.host_writes }, { smart.error_entries }), ([1, 0], [1, 0]));
    assert_eq!({ smart.data_units_written }, [1, 0]);
    // From an offset, and beyond the end.
    let tail = get_log(&mut host, log::SMART_HEALTH, 4, 500).unwrap();
    assert_eq!(tail, [0; 16]);
    assert_eq!(get_log(&mut host, log::SMART_HEALTH, 4, 516), Err(Status::INVALID_FIELD));
    assert_eq!(get_log(&mut host, log::SMART_HEALTH, 4, 2), Err(Status::INVALID_FIELD));
    assert_eq!(get_log(&mut host, log::SMART_HEALTH, 4, u64::MAX), Err(Status::INVALID_FIELD));
    assert_eq!(get_log(&mut host, 0x7f, 4, 0), Err(Status::INVALID_LOG_PAGE));
    assert_eq!(get_log(&mut host, log::FIRMWARE_SLOT, 4, 0).unwrap()[0], 1);
}

#[test]
fn exactly_the_commands_in_the_effects_log_are_known() {
    let mut host = TestHost::with_memory(1 << 20);
    let page = get_log(&mut host, log::COMMANDS_SUPPORTED, 1024, 0).unwrap();
    let effects = CommandsSupported::ref_from_bytes(&page).unwrap();
    for opcode in 0..=255u8 {
        let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
        sqe.cdw0.set_opcode(opcode);
        // The data pointer leads nowhere, so that nothing succeeds by accident.
        sqe.dptr = [3, 3];
        sqe.cdw10 = 0xfff0;
        if opcode != AdminOpcode::AsyncEventRequest as u8 {
            let known = host.status(0, sqe) != Status::INVALID_OPCODE;
            assert_eq!(known, effects.admin[usize::from(opcode)] & 1 != 0, "admin {opcode:#x}");
        }
        let known = host.status(1, sqe) != Status::INVALID_OPCODE;
        assert_eq!(known, effects.io[usize::from(opcode)] & 1 != 0, "io {opcode:#x}");
    }
}

#[test]
fn bad_doorbells_are_reported_by_events() {
    let mut host = TestHost::with_memory(1 << 20);
    let mut cids = Vec::new();
    for _ in 0..REQUEST_LIMIT {
        cids.push(host.submit(0, admin(AdminOpcode::AsyncEventRequest)));
    }
    let extra = host.status(0, admin(AdminOpcode::AsyncEventRequest));
    assert_eq!(extra, Status::AER_LIMIT_EXCEEDED);
    // A queue that does not exist.
    host.write4(reg::sq_tail_doorbell(9, DOORBELL_STRIDE), 1);
    let event = AsyncEvent::from(host.wait(0, cids[0]).dw0);
    assert_eq!((event.event_type(), event.info()), (fid::EVENT_ERROR, fid::ERROR_INVALID_DOORBELL));
    assert_eq!(event.log_page(), log::ERROR_INFORMATION);
    // A value outside of the queue waits until the log was read.
    host.write4(reg::sq_tail_doorbell(1, DOORBELL_STRIDE), u32::from(ENTRIES));
    while host.poll() == Work::Done {}
    assert_eq!(host.completion(0), None);
    get_log(&mut host, log::ERROR_INFORMATION, 16, 0).unwrap();
    let event = AsyncEvent::from(host.wait(0, cids[1]).dw0);
    assert_eq!(event.info(), fid::ERROR_INVALID_DOORBELL_VALUE);
    // A head beyond what was completed.
    get_log(&mut host, log::ERROR_INFORMATION, 16, 0).unwrap();
    host.write4(reg::cq_head_doorbell(1, DOORBELL_STRIDE), 5);
    let event = AsyncEvent::from(host.wait(0, cids[2]).dw0);
    assert_eq!(event.info(), fid::ERROR_INVALID_DOORBELL_VALUE);
    // The last request can be aborted, once.
    let mut abort = admin(AdminOpcode::Abort);
    abort.cdw10 = AbortCdw10::new().with_cid(cids[3]).into();
    let cid = host.submit(0, abort);
    assert_eq!(host.wait(0, cid).dw0, 0);
    assert_eq!(host.wait(0, cids[3]).status().code(), Status::ABORT_REQUESTED);
    assert_eq!(host.run(0, abort).dw0, 1);
    abort.cdw10 = AbortCdw10::new().with_sqid(7).into();
    assert_eq!(host.status(0, abort), Status::INVALID_FIELD);
}

#[test]
fn a_temperature_beyond_its_threshold_is_an_event_for_who_asked() {
    let mut host = TestHost::with_memory(1 << 20);
    let cid = host.submit(0, admin(AdminOpcode::AsyncEventRequest));
    let cold = TemperatureThreshold::new().with_tmpth(200);
    assert_eq!(set(&mut host, fid::TEMPERATURE_THRESHOLD, cold.into()), Status::SUCCESS);
    assert_eq!(host.completion(0), None);
    let wanted = AsyncEventConfig::new().with_smart(log::WARNING_TEMPERATURE);
    assert_eq!(set(&mut host, fid::ASYNC_EVENT_CONFIG, wanted.into()), Status::SUCCESS);
    let event = AsyncEvent::from(host.wait(0, cid).dw0);
    assert_eq!((event.event_type(), event.info()), (fid::EVENT_SMART, fid::SMART_TEMPERATURE));
    let smart = get_log(&mut host, log::SMART_HEALTH, 128, 0).unwrap();
    assert_eq!(smart[0], log::WARNING_TEMPERATURE);
}

#[test]
fn shutdown_completes_and_a_reset_starts_again() {
    let mut host = TestHost::with_memory(1 << 20);
    host.write_blocks(0, &[7; 512]);
    let cc = Cc::from(host.read4(reg::CC));
    host.write4(reg::CC, cc.with_shn(SHN_NORMAL).into());
    assert_eq!(host.csts().shst(), SHST_COMPLETE);
    host.submit(1, transfer(IoOpcode::Read, 0, 512, RAM));
    assert_eq!(host.poll(), Work::Asleep(None), "no command is taken after a shutdown");
    host.write4(reg::CC, 0);
    assert!(!host.csts().rdy() && host.csts().shst() == SHST_NORMAL);
    host.enable();
    host.create_pair(1, ENTRIES);
    assert_eq!(host.read_blocks(0, 512), vec![7; 512]);
}

#[test]
fn a_controller_reset_keeps_logs_and_a_scrub_keeps_nothing_but_data() {
    let mut host = TestHost::with_memory(1 << 20);
    set(&mut host, fid::INTERRUPT_COALESCING, 0x0101);
    host.write_blocks(3, &[9; 512]);
    host.write4(reg::CC, 0);
    host.enable();
    let get = feature(AdminOpcode::GetFeatures, fid::INTERRUPT_COALESCING, 0, 0);
    assert_eq!(host.run(0, get).dw0, 0, "features go back to their defaults");
    assert_eq!(get_log(&mut host, log::SMART_HEALTH, 128, 0).unwrap()[80], 1, "one write counted");
    host.endpoint.scrub();
    assert_eq!((host.read4(reg::ASQ), host.read4(reg::CC)), (u32::MAX, u32::MAX), "memory is off");
    let both = Access::READ | Access::WRITE;
    host.endpoint.map(RAM, RAM_SIZE, both, Some(host.ram.handle(0))).unwrap();
    host.command_register(0b110);
    assert_eq!((host.read4(reg::ASQ), host.read4(reg::AQA), host.read4(reg::CC)), (0, 0, 0));
    host.enable();
    assert_eq!(get_log(&mut host, log::SMART_HEALTH, 128, 0).unwrap()[80], 0);
    host.create_pair(1, ENTRIES);
    assert_eq!(host.read_blocks(3, 512), vec![9; 512]);
}

#[test]
fn an_impossible_configuration_is_fatal_until_reset() {
    let mut host = TestHost::plain(&NvmeConfig::memory(1 << 20, "T"));
    for cc in [Cc::new().with_mps(9), Cc::new().with_css(7), Cc::new().with_ams(1), Cc::new()] {
        // With the last one the admin queues have no size.
        host.write4(reg::CC, cc.with_en(true).into());
        assert!(host.csts().cfs() && !host.csts().rdy(), "{cc:?}");
        host.write4(reg::CC, 0);
        assert!(!host.csts().cfs());
    }
    host.enable();
}
