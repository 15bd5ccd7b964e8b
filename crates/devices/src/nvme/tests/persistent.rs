//! The persistent memory region: what commands move in and out of it, what survives whom, and what a driver hears when it
//! may not.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rackbus_memory::Region as Mapping;
use rackbus_pci::{FunctionState, NotPolled};
use rackbus_spec::nvme::features::{self as fid, AsyncEvent, AsyncEventConfig};
use rackbus_spec::nvme::log;
use rackbus_spec::nvme::registers::{
    BARRIER_STATUS, CMBMSC, Cap, Cmbmsc, PMRCAP, PMRCTL, PMRMSC, PMRSTS, Pmrcap, Pmrmsc, Pmrsts,
    REGION_SOUND,
};
use rackbus_spec::pcie::msix;

use super::super::persistent::BAR;
use super::*;

const SIZE: u64 = 64 << 10;
/// Where the host has the BAR.
const AT: u64 = 0x40_0000_0000;

/// A folder on a disk: those for temporary files are often in memory.
fn disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn config(folder: &Path) -> NvmeConfig {
    let persistent_file = Some(PathBuf::from(folder).join("region.pmr"));
    NvmeConfig { persistent: SIZE, persistent_file, ..NvmeConfig::memory(1 << 20, "TEST") }
}

/// A host that uses the region of a drive, and has given it addresses.
fn host(config: &NvmeConfig) -> TestHost {
    let mut host = TestHost::plain(config);
    host.enable();
    host.create_pair(1, ENTRIES);
    begin(&mut host);
    host
}

fn begin(host: &mut TestHost) {
    host.write4(PMRCTL, 1);
    place(host, AT);
    assert_eq!(barrier(host), Pmrsts::new());
}

fn place(host: &mut TestHost, at: u64) {
    let control = u64::from(Pmrmsc::new().with_cmse(true).with_cba(at >> 12));
    host.write4(PMRMSC, control as u32);
    host.write4(PMRMSC + 4, (control >> 32) as u32);
}

fn barrier(host: &mut TestHost) -> Pmrsts {
    Pmrsts::from(host.read4(PMRSTS))
}

/// The file that its user is given.
fn file(host: &TestHost) -> OwnedFd {
    let bars = host.endpoint.bars();
    let shared = bars.iter().find(|bar| bar.index == BAR).unwrap().mappable.clone().unwrap();
    shared.memory.descriptor().unwrap()
}

/// The region as its user maps it.
fn map(host: &TestHost) -> Mapping {
    Mapping::map_stored(file(host).as_fd(), 0, SIZE, Access::READ | Access::WRITE).unwrap()
}

fn bytes(of: &Mapping, at: usize, length: usize) -> Vec<u8> {
    let mut out = vec![0; length];
    of.whole().part(at, length).unwrap().copy_to(&mut out);
    out
}

#[test]
fn registers_say_what_the_region_is_and_the_interrupt_table_is_elsewhere() {
    let folder = disk();
    let mut host = TestHost::plain(&config(folder.path()));
    let mut cap = [0; 8];
    host.endpoint.read(FunctionRegion::Bar(0), reg::CAP, &mut cap).unwrap();
    let cap = Cap::from(u64::from_le_bytes(cap));
    assert!(cap.pmrs() && !cap.cmbs());
    let said = Pmrcap::from(host.read4(PMRCAP));
    assert!(said.rds() && said.wds() && said.cmss());
    assert_eq!((said.bir(), said.pmrwbm()), (BAR, BARRIER_STATUS));
    assert!(barrier(&mut host).nrdy());
    host.write4(PMRCTL, 1);
    assert_eq!(barrier(&mut host).hsts(), REGION_SOUND);
    assert!(!barrier(&mut host).nrdy());
    place(&mut host, !0xfff);
    assert!(barrier(&mut host).cbai());
    // BAR 4 is the region, so MSI-X has the upper half of BAR 0.
    let sizes: Vec<_> = host.endpoint.bars().iter().map(|bar| (bar.index, bar.size)).collect();
    assert_eq!(sizes, [(0, 16 << 10), (BAR, SIZE)]);
    let mut capability = [0; 12];
    host.endpoint.read(FunctionRegion::Config, 0x90, &mut capability).unwrap();
    assert_eq!(capability[0], rackbus_spec::pcie::capability::MSIX);
    let word = |at: usize| u32::from_le_bytes(*capability[at..].first_chunk().unwrap());
    assert_eq!((word(4), word(8)), (0x2000, 0x3000));
    host.endpoint.write(FunctionRegion::Bar(0), 0x2000 + msix::ENTRY_SIZE, &[1, 2, 3, 4]).unwrap();
    assert_eq!(host.read4(0x2000 + msix::ENTRY_SIZE), 0x0403_0201);
    // What a load from memory would not do, memory is not given for.
    let refused = host.endpoint.poll_registers(0).unwrap_err();
    assert!(matches!(refused, NotPolled::Barrier), "{refused}");
}

#[test]
fn a_region_that_a_loss_of_power_would_empty_is_refused() {
    // There are machines without.
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let refused = Nvme::new(&config(folder.path())).unwrap_err().to_string();
    assert!(refused.contains("it is on tmpfs"), "{refused}");
}

#[test]
fn commands_move_data_between_region_buffer_and_blocks() {
    let folder = disk();
    let mut host = host(&NvmeConfig { buffer: SIZE, ..config(folder.path()) });
    let mapped = map(&host);
    // The controller memory buffer lies where the region ends.
    let control = Cmbmsc::new().with_cre(true).with_cmse(true).with_cba((AT + SIZE) >> 12);
    host.endpoint.write(FunctionRegion::Bar(0), CMBMSC, &u64::from(control).to_le_bytes()).unwrap();
    host.write_blocks(8, &[[0x5a; 4096], [0x5b; 4096]].concat());
    let across = transfer(IoOpcode::Read, 8, 8192, AT + SIZE - 4096);
    assert_eq!(host.status(1, across), Status::SUCCESS);
    assert_eq!(bytes(&mapped, SIZE as usize - 4096, 4096), [0x5a; 4096]);
    let mut loaded = [0; 4];
    host.endpoint.read(FunctionRegion::Bar(2), 0, &mut loaded).unwrap();
    assert_eq!(loaded, [0x5b; 4]);
    mapped.whole().part(16384, 512).unwrap().fill(7);
    let write = transfer(IoOpcode::Write, 100, 512, AT + 16384);
    assert_eq!(host.status(1, write), Status::SUCCESS);
    assert_eq!(host.read_blocks(100, 512), [7; 512]);
    host.endpoint.write(FunctionRegion::Bar(BAR), 16384, &[9; 8]).unwrap();
    assert_eq!(bytes(&mapped, 16384, 9), [9, 9, 9, 9, 9, 9, 9, 9, 7]);
    // Lists are read from the host's memory only.
    let mut listed = transfer(IoOpcode::Read, 0, 3 * 4096, AT);
    listed.dptr[1] = AT + 4096;
    assert_eq!(host.status(1, listed), Status::DATA_TRANSFER_ERROR);
    // A region that is turned off has no addresses.
    host.write4(PMRCTL, 0);
    assert_eq!(host.status(1, write), Status::DATA_TRANSFER_ERROR);
}

#[test]
fn content_stays_over_users_and_processes_and_former_mappings_lead_nowhere() {
    let folder = disk();
    let config = config(folder.path());
    let mut first = host(&config);
    let former = map(&first);
    former.whole().part(4096, 8).unwrap().copy_from(b"content!");
    assert_eq!(barrier(&mut first).err(), 0);
    first.endpoint.scrub();
    assert_eq!(bytes(&former, 4096, 8), [0; 8], "it keeps what was given back");
    former.whole().part(4096, 8).unwrap().copy_from(b"too late");
    first.command_register(0b110);
    assert!(barrier(&mut first).nrdy(), "the next user finds the region turned on");
    let next = map(&first);
    assert_eq!(bytes(&next, 4096, 8), b"content!");
    next.whole().part(0, 8).unwrap().copy_from(b"of mine!");
    assert_eq!(bytes(&former, 0, 8), [0; 8]);
    drop(first);
    // Another process: the mapping of the former user's goes on, and leads nowhere.
    let second = host(&config);
    next.whole().part(0, 8).unwrap().copy_from(b"too late");
    let there = map(&second);
    assert_eq!([bytes(&there, 0, 8), bytes(&there, 4096, 8)].concat(), b"of mine!content!");
    let refused = Nvme::new(&config).unwrap_err().to_string();
    assert!(refused.contains("region.pmr is used by another process"), "{refused}");
}

/// Another process goes on with the drive.
fn go_on(host: &mut TestHost, config: &NvmeConfig) {
    let saved = host.endpoint.save().unwrap();
    let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
    let next = Nvme::resume(config, saved.medium).unwrap();
    host.endpoint = Endpoint::new(Box::new(next));
    host.endpoint.restore(&state, saved.descriptors).unwrap();
}

#[test]
fn another_process_goes_on_with_the_region_where_it_was() {
    let folder = disk();
    let config = config(folder.path());
    let mut host = host(&config);
    let mapped = map(&host);
    mapped.whole().part(0, 512).unwrap().fill(4);
    go_on(&mut host, &config);
    let write = transfer(IoOpcode::Write, 0, 512, AT);
    assert_eq!(host.status(1, write), Status::SUCCESS);
    assert_eq!(host.read_blocks(0, 512), [4; 512]);
    let read = transfer(IoOpcode::Read, 0, 512, AT + 4096);
    assert_eq!(host.status(1, read), Status::SUCCESS);
    assert_eq!(bytes(&mapped, 4096, 512), [4; 512]);
    assert_eq!(barrier(&mut host), Pmrsts::new());
    // The user has it mapped still, although this process gave it to nobody.
    host.endpoint.scrub();
    assert_eq!(bytes(&mapped, 4096, 512), [0; 512], "it keeps what was given back");
    mapped.whole().part(0, 8).unwrap().copy_from(b"too late");
    let after = map(&host);
    assert_eq!([bytes(&after, 0, 8), bytes(&after, 4096, 8)].concat(), [4; 16]);
}

/// The node was killed before it took the file away from a user who changed its size.
#[test]
fn a_region_whose_file_was_truncated_is_lent_again_after_the_node_was_killed() {
    let folder = disk();
    let config = config(folder.path());
    for size in [4096, SIZE + 1] {
        let first = host(&config);
        map(&first).whole().part(0, 8).unwrap().copy_from(b"content!");
        rustix::fs::ftruncate(file(&first), size).unwrap();
        drop(first);
        let mut second = host(&config);
        assert_eq!(bytes(&map(&second), 0, 8), b"content!");
        assert_eq!(barrier(&mut second).err(), 0);
    }
}

/// What was given to a user may be truncated by it: that is an error of the drive's region, not the end of its process.
#[test]
fn a_truncated_region_is_unreliable_until_the_drive_is_given_back() {
    truncate(false);
}

/// The driver has not asked before, so nobody has heard of it.
#[test]
fn a_truncated_region_is_unreliable_in_the_next_process() {
    truncate(true);
}

fn truncate(restarts: bool) {
    let folder = disk();
    let config = config(folder.path());
    let mut host = host(&config);
    let event = host.submit(0, admin(AdminOpcode::AsyncEventRequest));
    let wanted = AsyncEventConfig::new().with_smart(log::WARNING_REGION);
    let mut set = admin(AdminOpcode::SetFeatures);
    (set.cdw10, set.cdw11) = (fid::ASYNC_EVENT_CONFIG.into(), wanted.into());
    assert_eq!(host.run(0, set).status(), Status::SUCCESS);
    let file = file(&host);
    rustix::fs::ftruncate(&file, 0).unwrap();
    let read = transfer(IoOpcode::Read, 0, 512, AT + 4096);
    let _ = host.status(1, read);
    let mut loaded = [0; 8];
    host.endpoint.read(FunctionRegion::Bar(BAR), 8192, &mut loaded).unwrap();
    if restarts {
        rustix::fs::ftruncate(&file, SIZE).unwrap();
        go_on(&mut host, &config);
        host.endpoint.read(FunctionRegion::Bar(BAR), 8192, &mut loaded).unwrap();
    }
    assert_ne!(barrier(&mut host).err(), 0);
    assert!(host.endpoint.health().trouble().is_some());
    host.poll();
    let told = host.completion(0).expect("the driver hears nothing of it");
    assert_eq!(told.cid, event);
    let told = AsyncEvent::from(told.dw0);
    assert_eq!((told.event_type(), told.info()), (fid::EVENT_SMART, fid::SMART_RELIABILITY));
    host.endpoint.scrub();
    host.command_register(0b110);
    host.enable();
    begin(&mut host);
    assert_eq!(bytes(&map(&host), 0, 8), [0; 8]);
}
