//! I/O commands against a model of the disk.

use rackbus_spec::nvme::{IoOpcode, Status};

use super::*;

#[test]
fn what_is_written_is_read() {
    let mut host = Host::with_memory(1 << 20);
    let data: Vec<u8> = (0..4096u32).map(|i| (i * 7) as u8).collect();
    assert_eq!(host.write_blocks(8, &data), Status::SUCCESS);
    assert_eq!(host.read_blocks(8, 4096), data);
    assert_eq!(host.read_blocks(0, 4096), vec![0; 4096]);
    let buffer = host.scratch();
    host.poke(buffer, &data);
    assert_eq!(host.status(1, transfer(IoOpcode::Compare, 8, 4096, buffer)), Status::SUCCESS);
    host.poke(buffer, &[0xff]);
    assert_eq!(
        host.status(1, transfer(IoOpcode::Compare, 8, 4096, buffer)),
        Status::COMPARE_FAILURE
    );
}
