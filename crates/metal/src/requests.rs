//! What the borrower's kernel module asks of the lender, and in which order it is done (pure).
//!
//! The ring is the borrower's to write, so everything in it is checked: a request out of order, of an old lease,
//! or for a register that is not the borrower's is passed over and counted.

use serde::{Deserialize, Serialize};

use crate::window::RING_ENTRIES;

/// The command register, 2 bytes.
const COMMAND: u16 = 0x04;
/// Bit of [`COMMAND`] by which the function may do DMA.
const BUS_MASTER: u32 = 1 << 2;
/// Bits of the device control register that are the borrower's: relaxed ordering, no snoop, the size of reads.
pub const DEVICE_CONTROL_BITS: u16 = 1 << 4 | 1 << 11 | 7 << 12;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionRequest {
    /// The device may master its bus, or not.
    Master(bool),
    /// The borrower has enabled or masked MSI-X as a whole, which concerns its side alone.
    Msix,
    /// The device control register has these of [`DEVICE_CONTROL_BITS`].
    DeviceControl(u16),
    /// Reset the device, as a function-level reset does.
    Reset,
    /// Nobody at the borrower uses the function any more.
    Release,
    /// The function reaches nothing but what is mapped from then on, or all of the window again.
    Isolate(bool),
    /// The mapping that the ring's page describes is made, or ended.
    Map(bool),
}

/// Where the registers are that a borrower may ask to be written: offsets in configuration space, 0 for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Writable {
    /// Offset of the message control register of MSI-X.
    pub msix_control: u16,
    /// Device control of PCI Express.
    pub device_control: u16,
}

/// The lender's end of a ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestRing {
    epoch: u64,
    writable: Writable,
    consumer: u32,
    refused: u32,
}

impl RequestRing {
    /// The ring of a function that was just lent.
    pub fn new(epoch: u64, writable: Writable) -> RequestRing {
        RequestRing { epoch, writable, consumer: 0, refused: 0 }
    }

    /// The next request, when the ring's producer is there and `entry` reads an entry by its number. `None` when
    /// all is done. Whoever carries it out says so by [`done`](RequestRing::done); what was passed over is done by itself.
    pub fn next(
        &mut self,
        producer: u32,
        entry: impl Fn(u32) -> [u32; 4],
    ) -> Option<FunctionRequest> {
        let ahead = producer.wrapping_sub(self.consumer);
        if ahead > RING_ENTRIES {
            // No such ring: there is nothing in it that could be believed.
            self.refused = self.refused.wrapping_add(1);
            self.consumer = producer;
            return None;
        }
        for _ in 0..ahead {
            match self.check(entry(self.consumer)) {
                Some(request) => return Some(request),
                None => {
                    self.refused = self.refused.wrapping_add(1);
                    self.done();
                }
            }
        }
        None
    }

    /// The request that [`next`](RequestRing::next) gave is carried out.
    pub fn done(&mut self) {
        self.consumer = self.consumer.wrapping_add(1);
    }

    /// The epoch of the lease by which the function is lent.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Where the registers are that its borrower may ask to be written.
    pub fn writable(&self) -> Writable {
        self.writable
    }

    /// How far the ring is carried out, and how many requests were passed over.
    pub fn progress(&self) -> (u32, u32) {
        (self.consumer, self.refused)
    }

    fn check(&self, [seq, what, value, epoch]: [u32; 4]) -> Option<FunctionRequest> {
        if seq != self.consumer || epoch != self.epoch as u32 {
            return None;
        }
        let (kind, size, offset) = (what & 0xff, what >> 8 & 0xff, (what >> 16) as u16);
        let Writable { msix_control, device_control } = self.writable;
        match kind {
            1 if size == 2 && offset == COMMAND => {
                Some(FunctionRequest::Master(value & BUS_MASTER != 0))
            }
            1 if size == 2 && offset == msix_control && offset != 0 => Some(FunctionRequest::Msix),
            1 if size == 2 && offset == device_control && offset != 0 => {
                Some(FunctionRequest::DeviceControl(value as u16 & DEVICE_CONTROL_BITS))
            }
            2 if what >> 8 == 0 && value == 0 => Some(FunctionRequest::Reset),
            3 => Some(FunctionRequest::Release),
            4 if what >> 8 == 0 && value <= 1 => Some(FunctionRequest::Isolate(value == 1)),
            5 if what >> 8 == 0 && value <= 1 => Some(FunctionRequest::Map(value == 1)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WRITABLE: Writable = Writable { msix_control: 0x42, device_control: 0x68 };

    fn write(offset: u32, value: u32) -> (u32, u32) {
        (1 | 2 << 8 | offset << 16, value)
    }

    fn ring(entries: &[(u32, u32)]) -> impl Fn(u32) -> [u32; 4] {
        move |number| {
            let (what, value) = entries[number as usize];
            [number, what, value, 7]
        }
    }

    #[test]
    fn requests_are_carried_out_in_their_order() {
        let entries = [
            write(4, 6),
            write(0x42, 0x8000),
            write(0x68, 0xffff),
            (2, 0),
            write(4, 2),
            (4, 1),
            (5, 1),
            (5, 0),
            (3, 0),
        ];
        let mut requests = RequestRing::new(1 << 32 | 7, WRITABLE);
        let expected = [
            FunctionRequest::Master(true),
            FunctionRequest::Msix,
            FunctionRequest::DeviceControl(DEVICE_CONTROL_BITS),
            FunctionRequest::Reset,
            FunctionRequest::Master(false),
            FunctionRequest::Isolate(true),
            FunctionRequest::Map(true),
            FunctionRequest::Map(false),
            FunctionRequest::Release,
        ];
        for (number, request) in (1..).zip(expected) {
            assert_eq!(requests.next(9, ring(&entries)), Some(request));
            assert_eq!(requests.next(9, ring(&entries)), Some(request), "it is not done yet");
            requests.done();
            assert_eq!(requests.progress(), (number, 0));
        }
        assert_eq!(requests.next(9, ring(&entries)), None);
    }

    #[test]
    fn what_is_not_the_borrowers_is_passed_over() {
        let refused = [
            write(0x10, 0),
            write(0, 1),
            (1 | 4 << 8 | 4 << 16, 6),
            (9, 0),
            (2, 1),
            (4, 2),
            (5 | 1 << 16, 1),
        ];
        let mut requests = RequestRing::new(7, WRITABLE);
        assert_eq!(requests.next(7, ring(&refused)), None);
        assert_eq!(requests.progress(), (7, 7));
        let none = Writable { msix_control: 0, device_control: 0 };
        let mut requests = RequestRing::new(7, none);
        assert_eq!(requests.next(1, ring(&[write(0, 6)])), None, "no register is at 0");
        // Of another lease, or out of order.
        for wrong in [[0, 2, 0, 8], [1, 2, 0, 7]] {
            let mut requests = RequestRing::new(7, WRITABLE);
            assert_eq!(requests.next(1, |_| wrong), None);
            assert_eq!(requests.progress(), (1, 1));
        }
    }

    proptest! {
        /// Whatever is in the ring, it is done with after a bounded number of steps.
        #[test]
        fn any_ring_ends(
            producers in prop::collection::vec(any::<u32>(), 1..20),
            words in prop::collection::vec(any::<[u8; 4]>(), 128),
        ) {
            let mut requests = RequestRing::new(7, WRITABLE);
            for producer in producers {
                let entry = |number: u32| {
                    let [kind, size, offset, value] = words[(number % RING_ENTRIES) as usize];
                    let what = u32::from(kind % 7) | u32::from(size % 3) << 8 | u32::from(offset) << 16;
                    [number, what, value.into(), 7]
                };
                let mut steps = 0;
                while requests.next(producer, entry).is_some() {
                    requests.done();
                    steps += 1;
                    prop_assert!(steps <= RING_ENTRIES);
                }
                prop_assert_eq!(requests.progress().0, producer);
            }
        }
    }
}
