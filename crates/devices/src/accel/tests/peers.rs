//! Messages in BARs of other functions: each of their bytes is counted once, however its operation is done.

use rackbus_fabric::rack::Rack;
use rackbus_fabric::{BarPlace, Fabric, FabricHandle, derive};

use super::*;

/// Where a window to another function's BAR is.
const WINDOW: u64 = IOVA + (64 << 20);

/// A rack in which a function of beta's user reaches another one. The fabric knows them by name, and not what they do.
const RACK: &str = "name = \"lab\"\n[hosts.beta]\nmemory = \"64 MiB\"\n\
    [hosts.alpha.devices.first]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
    [hosts.alpha.devices.other]\nkind = \"nvme\"\nsize = \"1 MiB\"\n";

/// The tenant of a function of that rack.
fn tenant(pool: &Arc<EnginePool>) -> Tenant {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
    let mut tenant = Tenant::new(pool, 1);
    tenant.endpoint.scrub();
    tenant.endpoint.begin(fabric.lending("alpha/first", "beta").unwrap(), None);
    tenant.set_up();
    tenant
}

impl Tenant {
    /// Opens a window to a BAR at `address`.
    fn open_window(&mut self, address: u64, bar: &SharedMemory) {
        let place =
            BarPlace { function: "alpha/other".to_owned(), bar: 2, offset: address - WINDOW };
        let (length, access) = (bar.len() as u64, Access::READ | Access::WRITE);
        self.endpoint.open_window(address, length, access, place, bar.handle(0)).unwrap();
    }

    /// Bytes that were read from BARs and written there since `before`.
    fn moved_since(&self, before: (u64, u64)) -> (u64, u64) {
        let (read, written) = self.endpoint.dma().peer_bytes().get();
        (read - before.0, written - before.1)
    }

    /// Does a descriptor, and says what it moved from and to BARs.
    fn moved_by(&mut self, descriptor: Descriptor) -> (u64, u64) {
        let before = self.endpoint.dma().peer_bytes().get();
        self.memory.whole().write_obj(0, &descriptor);
        self.write(reg::DOORBELL, &1u32.to_le_bytes());
        assert_eq!(self.wait().status >> 1, OperationStatus::Success as u16, "{descriptor:?}");
        self.moved_since(before)
    }
}

/// A message that the function's thread does at once, one that an engine does, and one that the thread begins and an
/// engine ends; from one BAR, from two beside each other, and where only one end is in a BAR.
#[test]
fn bytes_of_other_functions_bars_are_counted_once() {
    const BAR: u64 = 1 << 20;
    let pool = EnginePool::new(PoolOptions::default());
    let bars = [0, 1].map(|_| SharedMemory::create("bar", BAR).unwrap());
    for length in [64, 4096, 64 << 10, 512 << 10] {
        for operation in [Operation::Copy, Operation::Crc32c, Operation::Deflate] {
            let message = |input, output| Descriptor {
                stages: [operation as u8, 0, 0, 0],
                input,
                output,
                input_length: length,
                output_length: length,
                ..Descriptor::default()
            };
            let (own, there, bytes) = (IOVA + INPUT, WINDOW, u64::from(length));
            let met = WINDOW + BAR - bytes / 2;
            for (input, output, moved) in [
                (there, IOVA + OUTPUT, (bytes, 0)),
                (own, there, (0, bytes)),
                (there, WINDOW + BAR, (bytes, bytes)),
                (met, IOVA + OUTPUT, (bytes, 0)),
                (own, met, (0, bytes)),
                (there, met, (bytes, bytes)),
            ] {
                let mut tenant = tenant(&pool);
                for (nth, bar) in (0..).zip(&bars) {
                    tenant.open_window(WINDOW + nth * BAR, bar);
                }
                let found = tenant.moved_by(message(input, output));
                assert_eq!(
                    found, moved,
                    "{operation:?} of {length} bytes at {input:#x} to {output:#x}"
                );
            }
        }
    }
}

/// What is mapped changes while an operation waits for an engine: its memory is looked up again, and the rings'.
#[test]
fn memory_that_is_looked_up_again_is_counted_once() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = tenant(&pool);
    pool.set_level(TenantId(1), Some(&"copy 0 op/s in 1 MB/s".parse().unwrap())).unwrap();
    let bar = SharedMemory::create("bar", 1 << 20).unwrap();
    tenant.open_window(WINDOW, &bar);
    let before = tenant.endpoint.dma().peer_bytes().get();
    for nth in 0..8 {
        let copy = Descriptor {
            stages: [Operation::Copy as u8, 0, 0, 0],
            input: WINDOW,
            output: IOVA + OUTPUT,
            input_length: 64 << 10,
            output_length: 64 << 10,
            ..Descriptor::default()
        };
        tenant.memory.whole().write_obj(nth * DESCRIPTOR_SIZE, &copy);
    }
    tenant.write(reg::DOORBELL, &8u32.to_le_bytes());
    let other = SharedMemory::create("other", 1 << 20).unwrap();
    for _ in 0..8 {
        tenant.wait();
        let (at, access) = (WINDOW + (64 << 20), Access::READ);
        tenant.endpoint.map(at, 1 << 20, access, Some(other.handle(0))).unwrap();
        tenant.poll();
        tenant.endpoint.unmap(at, 1 << 20).unwrap();
    }
    assert_eq!(tenant.moved_since(before), (8 * (64 << 10), 0));
}
