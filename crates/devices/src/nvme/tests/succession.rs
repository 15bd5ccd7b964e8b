//! A drive is saved with commands in flight, and another process continues with it.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rackbus_pci::{FunctionState, RestoreError, Saved};
use rackbus_spec::nvme::command::RwCdw12;
use rackbus_spec::nvme::data::DsmRange;
use rackbus_spec::nvme::features::{self as fid, AsyncEvent, AsyncEventConfig};
use rackbus_spec::nvme::registers::{SHST_COMPLETE, SHST_OCCURRING};
use rackbus_spec::nvme::{NSID_ALL, log};
use serde_json::Value;

use super::super::backing::MediaError;
use super::background::{BackgroundControl, slow_drive};
use super::*;

/// A drive whose medium waits to be told.
pub fn slow() -> (TestHost, Arc<Mutex<BackgroundControl>>) {
    let (nvme, control) = slow_drive();
    let mut host = TestHost::around(nvme);
    host.enable();
    host.create_pair(1, ENTRIES);
    (host, control)
}

/// The state after it was written down and read again.
fn written(saved: &Saved) -> FunctionState {
    FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap()
}

/// The host's drive continues in another process, with the data that is on the medium.
pub fn succeed(
    host: &mut TestHost,
    control: &Arc<Mutex<BackgroundControl>>,
) -> Arc<Mutex<BackgroundControl>> {
    let saved = host.endpoint.save().unwrap();
    let (next, medium) = slow_drive();
    medium.lock().unwrap().data = control.lock().unwrap().data.clone();
    host.endpoint = Endpoint::new(Box::new(next));
    host.endpoint.restore(&written(&saved), saved.descriptors).unwrap();
    medium
}

/// Lets everything end that is under way.
pub fn finish(host: &mut TestHost, control: &Arc<Mutex<BackgroundControl>>) {
    for _ in 0..100 {
        host.poll();
        let mut control = control.lock().unwrap();
        if !control.held.is_empty() {
            control.finish_one();
        }
    }
    host.poll();
}

#[test]
fn commands_in_flight_are_done_again_and_complete_once() {
    let (mut host, control) = slow();
    let (source, target, same) = (host.pages(1), host.pages(1), host.pages(1));
    host.poke(source, &[7; 512]);
    host.poke(same, &[0x11; 512]);
    let cids = [
        host.submit(1, transfer(IoOpcode::Write, 3, 512, source)),
        host.submit(1, transfer(IoOpcode::Read, 9, 512, target)),
        host.submit(1, transfer(IoOpcode::Compare, 5, 512, same)),
        host.submit(1, transfer(IoOpcode::WriteZeroes, 20, 512, 0)),
    ];
    let delete = host.submit(0, Sqe { cdw10: 1, ..admin(AdminOpcode::DeleteSq) });
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 4);
    let control = succeed(&mut host, &control);
    assert_eq!(control.lock().unwrap().held.len(), 4, "done again at once");
    finish(&mut host, &control);
    assert_eq!(host.wait(0, delete).status(), Status::SUCCESS);
    let mut ended: Vec<u16> = std::iter::from_fn(|| host.take_completion(1))
        .inspect(|cqe| assert_eq!(cqe.status(), Status::SUCCESS))
        .map(|cqe| cqe.cid)
        .collect();
    ended.sort_unstable();
    assert_eq!(ended, cids, "each once");
    assert_eq!(host.peek(target, 512), [0x11; 512]);
    let control = control.lock().unwrap();
    assert_eq!(control.data[3 * 512..4 * 512], [7; 512]);
    assert_eq!(control.data[20 * 512..21 * 512], [0; 512]);
}

/// A write with FUA that failed and whose batch had not ended: nobody has been told when the state is taken.
#[test]
fn a_failure_that_nobody_heard_of_is_an_event_and_a_failed_command_of_the_next_life() {
    let (mut host, control) = slow();
    let event = host.submit(0, admin(AdminOpcode::AsyncEventRequest));
    let wanted = AsyncEventConfig::new().with_smart(log::WARNING_RELIABILITY);
    let mut set = admin(AdminOpcode::SetFeatures);
    (set.cdw10, set.cdw11) = (fid::ASYNC_EVENT_CONFIG.into(), wanted.into());
    assert_eq!(host.run(0, set).status(), Status::SUCCESS);
    let buffer = host.scratch();
    let mut write = transfer(IoOpcode::Write, 3, 512, buffer);
    write.cdw12 = RwCdw12::from(write.cdw12).with_fua(true).into();
    let cid = host.submit(1, write);
    host.poll();
    control.lock().unwrap().outcome = Some(Err(MediaError::NotDurable));

    succeed(&mut host, &control);
    assert_eq!(host.wait(1, cid).status().code(), Status::WRITE_FAULT);
    let event = AsyncEvent::from(host.wait(0, event).dw0);
    assert_eq!((event.event_type(), event.info()), (fid::EVENT_SMART, fid::SMART_RELIABILITY));
    let counted = host.endpoint.operations().counts(&[]);
    let (_, writes) = counted.iter().find(|(kind, _)| *kind == "write").unwrap();
    assert_eq!((writes.done, writes.failed), (1, 1), "it is counted where it is answered");
}

#[test]
fn what_has_ended_is_answered_before_the_state_is_taken() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    let cid = host.submit(1, transfer(IoOpcode::Write, 3, 512, buffer));
    host.poll();
    control.lock().unwrap().finish_one();
    let control = succeed(&mut host, &control);
    assert!(control.lock().unwrap().held.is_empty(), "nothing is left to be done");
    assert_eq!(host.take_completion(1).map(|cqe| cqe.cid), Some(cid));
    assert_eq!(host.take_completion(1), None);
}

#[test]
fn ranges_are_not_read_again() {
    let (mut host, control) = slow();
    let list = host.pages(1);
    let range = |slba: u64| DsmRange { attributes: 0, nlb: 1, slba };
    for (index, slba) in [2u64, 4].into_iter().enumerate() {
        host.ram.whole().write_obj((list - RAM) as usize + index * 16, &range(slba)).unwrap();
    }
    let mut sqe = transfer(IoOpcode::DatasetManagement, 0, 512, list);
    (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (1, 4, 0);
    let cid = host.submit(1, sqe);
    host.poll();
    // The first range is done, the second is under way.
    control.lock().unwrap().finish_one();
    host.poll();
    host.unmap_ram();
    let control = succeed(&mut host, &control);
    finish(&mut host, &control);
    host.map_ram();
    assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
    let control = control.lock().unwrap();
    assert_eq!(control.data[2 * 512..3 * 512], [0; 512]);
    assert_eq!(control.data[4 * 512..5 * 512], [0; 512]);
    assert_eq!(control.data[5 * 512], 0x11);
}

#[test]
fn settings_events_and_logs_are_as_they_were() {
    let (mut host, control) = slow();
    let aer = host.submit(0, admin(AdminOpcode::AsyncEventRequest));
    let mut set = admin(AdminOpcode::SetFeatures);
    (set.cdw10, set.cdw11) = (fid::INTERRUPT_COALESCING.into(), 0x0503);
    assert_eq!(host.run(0, set).status(), Status::SUCCESS);
    let beyond = transfer(IoOpcode::Read, 1 << 40, 512, host.scratch());
    assert_eq!(host.status(1, beyond), Status::LBA_OUT_OF_RANGE);
    let page = host.scratch();
    let log = admin_data(AdminOpcode::GetLogPage, NSID_ALL, 1 | 127 << 16, page);
    host.run(0, log);
    let before = host.peek(page, 512);
    let mut cache = admin(AdminOpcode::SetFeatures);
    cache.cdw10 = fid::VOLATILE_WRITE_CACHE.into();
    let cache = host.submit(0, cache);
    host.poll();

    let control = succeed(&mut host, &control);
    finish(&mut host, &control);
    assert_eq!(host.wait(0, cache).status(), Status::SUCCESS);
    assert_eq!(control.lock().unwrap().flushes, 1);
    host.poke(page, &[0xee; 512]);
    host.run(0, log);
    assert_eq!(host.peek(page, 512), before);
    for (feature, value) in [(fid::INTERRUPT_COALESCING, 0x0503), (fid::VOLATILE_WRITE_CACHE, 0)] {
        let get = Sqe { cdw10: feature.into(), ..admin(AdminOpcode::GetFeatures) };
        assert_eq!(host.run(0, get).dw0, value);
    }
    // A doorbell that is not there: the event goes to the request of the life before.
    host.write4(reg::sq_tail_doorbell(30, DOORBELL_STRIDE), 1);
    assert_eq!(host.wait(0, aer).status(), Status::SUCCESS);
}

#[test]
fn a_shutdown_goes_on() {
    let (mut host, control) = slow();
    let cc = Cc::from(host.read4(reg::CC));
    host.write4(reg::CC, cc.with_shn(1).into());
    host.poll();
    let control = succeed(&mut host, &control);
    assert_eq!(host.csts().shst(), SHST_OCCURRING);
    finish(&mut host, &control);
    assert_eq!(host.csts().shst(), SHST_COMPLETE);
    assert_eq!(control.lock().unwrap().flushes, 1);
}

#[test]
fn a_file_goes_on_with_what_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let config = NvmeConfig::file(folder.path().join("drive"), 1 << 20, "FILE");
    let mut host = TestHost::plain(&config);
    host.enable();
    host.create_pair(1, ENTRIES);
    assert_eq!(host.write_blocks(8, &[5; 4096]), Status::SUCCESS);
    let flush = Sqe { nsid: 1, ..Sqe::default() };
    let cid = host.submit(1, flush);
    host.poll();
    let saved = host.endpoint.save().unwrap();
    assert_eq!(saved.medium.len(), 1, "the witness");
    host.endpoint = Endpoint::new(Box::new(Nvme::new(&NvmeConfig::memory(512, "-")).unwrap()));
    let error = Nvme::resume(&config, Vec::new()).unwrap_err();
    assert!(error.to_string().contains("none was given"), "{error}");
    let other = tempfile::tempfile().unwrap();
    assert!(Nvme::resume(&config, vec![other.into()]).is_err(), "of another file");
    let next = Nvme::resume(&config, saved.medium).unwrap();
    host.endpoint = Endpoint::new(Box::new(next));
    host.endpoint
        .restore(
            &FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap(),
            saved.descriptors,
        )
        .unwrap();
    assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
    assert_eq!(host.read_blocks(8, 4096), [5; 4096]);
    assert_eq!(host.status(1, flush), Status::SUCCESS);
}

#[test]
fn a_drive_in_memory_goes_on_with_its_data() {
    let config = NvmeConfig::memory(1 << 20, "MEMORY");
    let mut host = TestHost::plain(&config);
    host.enable();
    host.create_pair(1, ENTRIES);
    assert_eq!(host.write_blocks(8, &[5; 4096]), Status::SUCCESS);
    let saved = host.endpoint.save().unwrap();
    let next = Nvme::resume(&config, saved.medium).unwrap();
    host.endpoint = Endpoint::new(Box::new(next));
    host.endpoint.restore(&saved.state, saved.descriptors).unwrap();
    assert_eq!(host.read_blocks(8, 4096), [5; 4096]);
}

#[test]
fn states_of_others_and_of_newer_programs_are_refused() {
    let (mut host, _control) = slow();
    let saved = host.endpoint.save().unwrap();
    let refuse = |state: &FunctionState, nvme: Nvme| {
        let own = saved.descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
        Endpoint::new(Box::new(nvme)).restore(state, own).unwrap_err()
    };
    let other = Nvme::new(&NvmeConfig::memory(1 << 20, "OTHER")).unwrap();
    let error = refuse(&saved.state, other);
    assert!(matches!(error, RestoreError::Different(_)), "{error}");
    assert!(error.to_string().contains("SLOW") && error.to_string().contains("OTHER"), "{error}");
    let mut text: Value = serde_json::from_slice(&saved.state.to_bytes().unwrap()).unwrap();
    text["model"]["version"] = 3.into();
    let newer = FunctionState::from_bytes(&serde_json::to_vec(&text).unwrap()).unwrap();
    let error = refuse(&newer, slow_drive().0);
    assert!(matches!(error, RestoreError::Newer { found: 3, known: 2 }), "{error}");
    text["model"]["class"] = "accelerator".into();
    let class = FunctionState::from_bytes(&serde_json::to_vec(&text).unwrap()).unwrap();
    assert!(matches!(refuse(&class, slow_drive().0), RestoreError::Different(_)));
    let memory = NvmeConfig::memory(1 << 20, "MEMORY");
    let error = Nvme::resume(&memory, Vec::new()).unwrap_err().to_string();
    assert!(error.contains("was not passed on"), "{error}");
    // Memory that its holder could truncate is not what a drive in memory has.
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, 1 << 20).unwrap();
    assert!(Nvme::resume(&memory, vec![unsealed]).is_err());
}

/// A state with a bit of everything in it, as JSON, with its memory.
fn rich() -> (Value, Saved, SharedMemory) {
    let (mut host, _control) = slow();
    host.configure_shadow();
    host.create_pair(2, ENTRIES);
    let buffer = host.scratch();
    host.submit(0, admin(AdminOpcode::AsyncEventRequest));
    host.write4(reg::sq_tail_doorbell(30, DOORBELL_STRIDE), 1);
    host.poll();
    for opcode in [IoOpcode::Write, IoOpcode::Compare, IoOpcode::WriteZeroes, IoOpcode::Read] {
        host.enqueue(1, transfer(opcode, 3, 512, buffer));
    }
    host.ring(1);
    host.submit(0, Sqe { cdw10: 1, ..admin(AdminOpcode::DeleteSq) });
    host.poll();
    let saved = host.endpoint.save().unwrap();
    let value = serde_json::from_slice(&saved.state.to_bytes().unwrap()).unwrap();
    (value, saved, host.ram)
}

/// All places of `value` that are no list or object.
fn leaves<'a>(value: &'a mut Value, found: &mut Vec<&'a mut Value>) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|item| leaves(item, found)),
        Value::Object(fields) => fields.values_mut().for_each(|field| leaves(field, found)),
        leaf => found.push(leaf),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the state says, it is restored or refused, and what is restored can be used.
    #[test]
    fn damaged_states_do_no_harm(
        changes in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![
                any::<u64>().prop_map(Value::from), (0u64..70_000).prop_map(Value::from),
                any::<bool>().prop_map(Value::from), Just(Value::Null),
            ]), 1..4),
        doubled: bool,
    ) {
        let (mut value, saved, ram) = rich();
        let drive = &mut value["model"]["state"];
        for (place, new) in changes {
            let mut places = Vec::new();
            leaves(drive, &mut places);
            let count = places.len();
            *places[place.index(count)] = new;
        }
        if doubled && let Some(jobs) = drive["jobs"].as_array_mut() {
            let again = jobs.clone();
            (0..100).for_each(|_| jobs.extend(again.iter().cloned()));
        }
        let Ok(state) = FunctionState::from_bytes(&serde_json::to_vec(&value).unwrap()) else {
            return Ok(());
        };
        let (next, control) = slow_drive();
        let mut endpoint = Endpoint::new(Box::new(next));
        if endpoint.restore(&state, saved.descriptors).is_err() {
            prop_assert!(endpoint.dma().is_empty());
            return Ok(());
        }
        prop_assert!(!doubled, "more commands than there can be");
        let mut host = TestHost::with_restored(endpoint, ram);
        for qid in 0..3 {
            host.write4(reg::sq_tail_doorbell(qid, DOORBELL_STRIDE), 3);
            host.write4(reg::cq_head_doorbell(qid, DOORBELL_STRIDE), 1);
        }
        finish(&mut host, &control);
        host.endpoint.park();
        host.endpoint.save().unwrap();
        host.endpoint.scrub();
    }
}
