//! The controller memory buffer: what commands move in and out of it, who finds what in it, and for how long.

use rackbus_memory::Region as Mapping;
use rackbus_pci::FunctionState;
use rackbus_spec::nvme::registers::{CMBMSC, Cmbmsc};

use super::super::buffer::BAR;
use super::*;

const SIZE: u64 = 64 << 10;
/// Where the host has the BAR.
const AT: u64 = 0x40_0000_0000;

fn config() -> NvmeConfig {
    NvmeConfig { buffer: SIZE, ..NvmeConfig::memory(1 << 20, "TEST") }
}

/// A host that has given the buffer addresses.
fn host() -> TestHost {
    let mut host = TestHost::plain(&config());
    host.enable();
    host.create_pair(1, ENTRIES);
    place(&mut host, AT);
    host
}

fn place(host: &mut TestHost, at: u64) {
    let control = Cmbmsc::new().with_cre(true).with_cmse(true).with_cba(at >> 12);
    let bytes = u64::from(control).to_le_bytes();
    host.endpoint.write(FunctionRegion::Bar(0), CMBMSC, &bytes).unwrap();
}

/// The buffer as its user maps it.
fn map(host: &TestHost) -> Mapping {
    let bars = host.endpoint.bars();
    let shared = bars.iter().find(|bar| bar.index == BAR).unwrap().mappable.clone().unwrap();
    let file = shared.memory.descriptor().unwrap();
    Mapping::map(file.as_fd(), 0, SIZE, Access::READ | Access::WRITE).unwrap()
}

fn bytes(of: &Mapping, at: usize, length: usize) -> Vec<u8> {
    let mut out = vec![0; length];
    of.whole().part(at, length).unwrap().copy_to(&mut out);
    out
}

#[test]
fn commands_move_data_in_and_out_of_what_the_user_has_mapped() {
    let mut host = host();
    let mapped = map(&host);
    host.write_blocks(8, &[0x5a; 4096]);
    let read = transfer(IoOpcode::Read, 8, 4096, AT + 8192);
    assert_eq!(host.status(1, read), Status::SUCCESS);
    assert_eq!(bytes(&mapped, 8192, 4096), [0x5a; 4096]);
    mapped.whole().part(16384, 512).unwrap().fill(7);
    let write = transfer(IoOpcode::Write, 100, 512, AT + 16384);
    assert_eq!(host.status(1, write), Status::SUCCESS);
    assert_eq!(host.read_blocks(100, 512), [7; 512]);
    // By messages, where nothing can be mapped.
    let mut loaded = [0; 8];
    host.endpoint.read(FunctionRegion::Bar(BAR), 16384, &mut loaded).unwrap();
    assert_eq!(loaded, [7; 8]);
    host.endpoint.write(FunctionRegion::Bar(BAR), 16384, &[9; 8]).unwrap();
    assert_eq!(bytes(&mapped, 16384, 9), [9, 9, 9, 9, 9, 9, 9, 9, 7]);
    // An admin command's data, too.
    assert_eq!(host.status(0, admin_data(AdminOpcode::Identify, 0, 1, AT)), Status::SUCCESS);
    assert_eq!(bytes(&mapped, 4, 4), *b"TEST");
}

#[test]
fn data_may_lie_in_the_buffer_and_in_the_hosts_memory_beside_it() {
    let mut host = host();
    let mapped = map(&host);
    host.write_blocks(0, &[[1; 4096], [2; 4096]].concat());
    // One page here and one there: a list whose pieces do not adjoin.
    let page = host.pages(1);
    let mut read = transfer(IoOpcode::Read, 0, 8192, page);
    read.dptr = [page, AT + SIZE - 4096];
    assert_eq!(host.status(1, read), Status::SUCCESS);
    assert_eq!(host.peek(page, 4096), [1; 4096]);
    assert_eq!(bytes(&mapped, SIZE as usize - 4096, 4096), [2; 4096]);
    // The host's memory begins where the buffer ends.
    place(&mut host, RAM - SIZE);
    let across = transfer(IoOpcode::Read, 0, 8192, RAM - 4096);
    let kept = host.peek(RAM, 4096);
    assert_eq!(host.status(1, across), Status::SUCCESS);
    assert_eq!(bytes(&mapped, SIZE as usize - 4096, 4096), [1; 4096]);
    assert_eq!(host.peek(RAM, 4096), [2; 4096]);
    host.poke(RAM, &kept);
}

#[test]
fn addresses_of_a_buffer_that_is_not_there_are_nobodys() {
    let mut host = host();
    let read = transfer(IoOpcode::Read, 0, 4096, AT);
    let beyond = transfer(IoOpcode::Read, 0, 8192, AT + SIZE - 4096);
    assert_eq!(host.status(1, beyond), Status::DATA_TRANSFER_ERROR);
    assert_eq!(host.status(1, read), Status::SUCCESS);
    host.endpoint.write(FunctionRegion::Bar(0), CMBMSC, &1u64.to_le_bytes()).unwrap();
    assert_eq!(host.status(1, read), Status::DATA_TRANSFER_ERROR);
    // A reset of the controller leaves the register as it is; one of the function does not.
    place(&mut host, AT);
    host.write4(reg::CC, 0);
    host.enable();
    host.create_pair(1, ENTRIES);
    assert_eq!(host.status(1, read), Status::SUCCESS);
    host.endpoint.reset();
    host.command_register(0b110);
    assert_eq!(host.read4(CMBMSC), 0);
    // Lists are read from the host's memory only.
    let mut host = super::buffer::host();
    let mut listed = transfer(IoOpcode::Read, 0, 3 * 4096, AT);
    listed.dptr[1] = AT + 4096;
    assert_eq!(host.status(1, listed), Status::INVALID_USE_OF_BUFFER);
}

#[test]
fn a_former_user_has_nothing_of_the_next_ones_and_the_reverse() {
    let mut host = host();
    let former = map(&host);
    former.whole().fill(0x77);
    host.endpoint.scrub();
    assert_eq!(bytes(&former, 0, 64), [0; 64], "it keeps what was given back");
    let next = map(&host);
    assert_eq!(bytes(&next, 0, SIZE as usize), [0; SIZE as usize]);
    former.whole().fill(0x66);
    next.whole().part(100, 1).unwrap().fill(1);
    assert_eq!((bytes(&next, 0, 100), bytes(&former, 100, 1)), (vec![0; 100], vec![0x66]));
}

#[test]
fn another_process_goes_on_with_the_buffer_where_it_was() {
    let mut host = host();
    let mapped = map(&host);
    host.write_blocks(0, &[3; 512]);
    mapped.whole().part(0, 512).unwrap().fill(4);
    let saved = host.endpoint.save().unwrap();
    let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
    let next = Nvme::resume(&config(), saved.medium).unwrap();
    host.endpoint = Endpoint::new(Box::new(next));
    host.endpoint.restore(&state, saved.descriptors).unwrap();
    // The medium was memory of the former process'; the buffer is a file of both.
    let write = transfer(IoOpcode::Write, 0, 512, AT);
    assert_eq!(host.status(1, write), Status::SUCCESS);
    assert_eq!(host.read_blocks(0, 512), [4; 512]);
    let read = transfer(IoOpcode::Read, 0, 512, AT + 4096);
    assert_eq!(host.status(1, read), Status::SUCCESS);
    assert_eq!(bytes(&mapped, 4096, 512), [4; 512]);
}
