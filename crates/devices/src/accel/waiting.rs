//! Descriptors that wait for something in memory: until a drive says that it has read, for what is behind them in
//! the ring is about that.

use std::sync::atomic::Ordering;

use rackbus_memory::Access;
use rackbus_pci::Bus;
use rackbus_spec::accel::{Condition, Descriptor, Operation, OperationStatus};
use zerocopy::transmute;

use super::queue::QueuePair;
use super::request::check;

/// What is waited for is looked at so often, in nanoseconds.
pub const LOOK_NS: u64 = 20_000;

/// What becomes of a queue's next descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextDescriptor {
    /// It is to be begun, as any.
    Begin,
    /// It stays in the ring for now.
    NotYet,
    /// It was taken from the ring, and has ended.
    Over(Result<(), OperationStatus>),
}

/// Looks whether the next descriptor of a queue waits, and for how long.
pub fn look(bus: &Bus<'_>, queue: &mut QueuePair, descriptor: &Descriptor) -> NextDescriptor {
    if let Some(status) = queue.in_vain.take() {
        queue.take();
        return NextDescriptor::Over(Err(
            OperationStatus::from_number(status).unwrap_or(OperationStatus::TimedOut)
        ));
    }
    if descriptor.stages[0] != Operation::Wait as u8 || check(descriptor).is_err() {
        return NextDescriptor::Begin;
    }
    let limit_ns = u64::from(descriptor.associated) * 1_000_000;
    let until = *queue.waits_until.get_or_insert(bus.now_ns.saturating_add(limit_ns));
    let word = bus.dma.slice(descriptor.input, size_of::<u32>(), Access::READ);
    let word = word.ok().and_then(|word| word.load_u32(0, Ordering::Acquire));
    let outcome = match word.map(|word| judge(word, &transmute!(descriptor.nonce))) {
        None => Err(OperationStatus::Transfer),
        Some(Some(outcome)) => outcome,
        Some(None) if bus.now_ns >= until => Err(OperationStatus::TimedOut),
        Some(None) => return NextDescriptor::NotYet,
    };
    queue.take();
    queue.in_vain = outcome.err().map(|status| status as u16);
    NextDescriptor::Over(outcome)
}

/// What a word means: nothing yet, that all is well, or that it is not.
fn judge(word: u32, condition: &Condition) -> Option<Result<(), OperationStatus>> {
    let Condition { mask, value, good_mask, good_value } = *condition;
    let there = word & mask == value;
    let good = word & good_mask == good_value;
    there.then_some(if good { Ok(()) } else { Err(OperationStatus::ConditionFailed) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drive's completion: the command's identifier, the phase tag, and its status above that.
    #[test]
    fn a_word_is_there_by_some_of_its_bits_and_well_by_others() {
        let condition = Condition {
            mask: 0x1_0000,
            value: 0x1_0000,
            good_mask: u32::MAX,
            good_value: 0x1_0007,
        };
        assert_eq!(judge(0x7, &condition), None);
        assert_eq!(judge(0x1_0007, &condition), Some(Ok(())));
        for other in [0x1_0008, 0x101_0007, 0x3_0007] {
            assert_eq!(
                judge(other, &condition),
                Some(Err(OperationStatus::ConditionFailed)),
                "{other:#x}"
            );
        }
        let always = Condition::default();
        assert_eq!(judge(5, &always), Some(Ok(())));
    }
}
