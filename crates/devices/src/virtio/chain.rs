//! The buffers of one request: a chain of descriptors, checked.

use rackbus_memory::DmaSpace;
use rackbus_spec::virtio::ring::{DESCRIPTOR_SIZE, SplitDescriptor, flags};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{DriverFault, QueueError};

/// Descriptors of a table at most, and of a chain.
pub const MOST: usize = 1024;

/// A part of a request in the driver's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Its first byte, as the function addresses it.
    pub address: u64,
    /// Length of the piece in bytes.
    pub length: u32,
}

/// A request: what the device reads, then what it writes. Its vectors are used again for the next one.
#[derive(Debug, Default)]
pub struct BufferChain {
    /// The driver's name for it.
    pub id: u16,
    /// Descriptors of the ring that it takes.
    pub slots: u16,
    /// What the device reads.
    pub readable: Vec<Buffer>,
    /// What the device writes.
    pub writable: Vec<Buffer>,
    /// Bytes of all that it reads.
    pub readable_bytes: u64,
    /// The same of what it writes.
    pub writable_bytes: u64,
    count: usize,
}

impl BufferChain {
    pub(super) fn begin(&mut self, id: u16) {
        (self.id, self.slots, self.count) = (id, 0, 0);
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);
    }

    /// Adds the buffer of a descriptor with these flags. Empty ones are left out.
    #[inline]
    pub(super) fn add(&mut self, address: u64, length: u32, flags: u16) -> Result<(), QueueError> {
        self.count += 1;
        if self.count > MOST {
            return Err(DriverFault::Chain.into());
        }
        let buffer = Buffer { address, length };
        if flags & flags::WRITE != 0 {
            self.writable_bytes += u64::from(length);
            self.writable.push(buffer);
        } else if self.writable.is_empty() {
            self.readable_bytes += u64::from(length);
            self.readable.push(buffer);
        } else {
            return Err(DriverFault::Order.into());
        }
        Ok(())
    }

    /// Adds what a table of a split ring has: from its first descriptor on, as each says.
    pub(super) fn add_table(
        &mut self,
        dma: &DmaSpace,
        address: u64,
        length: u32,
    ) -> Result<(), QueueError> {
        let (table, count) = table::<SplitDescriptor>(dma, address, length)?;
        let table = &table[..count];
        let mut at = 0;
        for _ in 0..count {
            let Some(descriptor) = table.get(at) else { return Err(DriverFault::Outside.into()) };
            if descriptor.flags & flags::INDIRECT != 0 {
                return Err(DriverFault::Nested.into());
            }
            self.add(descriptor.address, descriptor.length, descriptor.flags)?;
            if descriptor.flags & flags::NEXT == 0 {
                return Ok(());
            }
            at = usize::from(descriptor.next);
        }
        Err(DriverFault::Chain.into())
    }
}

/// Descriptors that are read without another allocation.
const USUAL: usize = 32;

/// A copy of a table of descriptors.
pub(super) enum DescriptorTable<T> {
    /// As many as most requests have, without an allocation.
    Usual([T; USUAL]),
    Long(Vec<T>),
}

impl<T> std::ops::Deref for DescriptorTable<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            DescriptorTable::Usual(table) => table,
            DescriptorTable::Long(table) => table,
        }
    }
}

/// Reads a table of `length` bytes: a copy, and how many descriptors it has.
pub(super) fn table<T>(
    dma: &DmaSpace,
    address: u64,
    length: u32,
) -> Result<(DescriptorTable<T>, usize), QueueError>
where
    T: Copy + Default + FromBytes + IntoBytes + Immutable,
{
    let (count, rest) = (length as usize / DESCRIPTOR_SIZE, length as usize % DESCRIPTOR_SIZE);
    if rest != 0 || count == 0 || count > MOST {
        return Err(DriverFault::Table.into());
    }
    let mut table = match count {
        ..=USUAL => DescriptorTable::Usual([T::default(); USUAL]),
        _ => DescriptorTable::Long(vec![T::default(); count]),
    };
    let part = match &mut table {
        DescriptorTable::Usual(table) => &mut table[..count],
        DescriptorTable::Long(table) => &mut table[..],
    };
    dma.read(address, part.as_mut_bytes()).map_err(|_| QueueError::Unreachable)?;
    Ok((table, count))
}
