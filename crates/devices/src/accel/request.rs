//! What a descriptor asks for: read once, checked, and then only this is used.

use std::sync::Arc;

use rackbus_memory::{Access, DmaFault, DmaSlice, DmaSpace, PinnedPieces};
use rackbus_spec::accel::{
    Descriptor, LONGEST_WAIT, Operation, OperationStatus, SEGMENTS, STAGES, SglEntry,
};

use super::LARGEST;
use super::contexts::Contexts;
use super::engines::{Context, OperationRequest, Spare, takes_associated, takes_nonce};
use super::gather::Gather;
use super::pipeline::Pipeline;

/// A descriptor whose fields are within their bounds. What it names may still not be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckedDescriptor {
    /// The operations of the pipeline, in order; `stages` of them count.
    operations: [Operation; STAGES],
    stages: usize,
}

impl CheckedDescriptor {
    /// The operations, one at least.
    pub fn operations(&self) -> &[Operation] {
        &self.operations[..self.stages]
    }

    /// Whether the output is as long as the input at every point, so that the two may be the same memory.
    pub fn keeps_length(&self) -> bool {
        let keeps =
            |operation: &Operation| matches!(operation, Operation::Copy | Operation::Aes256Ctr);
        self.operations().iter().all(keeps)
    }
}

/// Checks the fields of a descriptor.
///
/// # Errors
/// The status that it ends with.
pub fn check(descriptor: &Descriptor) -> Result<CheckedDescriptor, OperationStatus> {
    let stages = descriptor.stages.iter().take_while(|number| **number != 0).count();
    if stages == 0 || descriptor.stages[stages..].iter().any(|number| *number != 0) {
        return Err(OperationStatus::InvalidOperation);
    }
    let mut operations = [Operation::Copy; STAGES];
    for (operation, number) in operations.iter_mut().zip(&descriptor.stages[..stages]) {
        *operation = Operation::from_number(*number).ok_or(OperationStatus::InvalidOperation)?;
    }
    let plan = CheckedDescriptor { operations, stages };
    let is_management = |operation: &Operation| {
        matches!(operation, Operation::CreateContext | Operation::DestroyContext | Operation::Wait)
    };
    match plan.operations() {
        [Operation::Wait] => return check_wait(descriptor).map(|()| plan),
        // A context is made for an operation, which the next stage names.
        [Operation::CreateContext, of] if !is_management(of) => {}
        [Operation::DestroyContext] => {}
        chain if chain.iter().any(is_management) => return Err(OperationStatus::InvalidOperation),
        _ => {}
    }
    // There is one nonce, and what is authenticated only is at the beginning of the input.
    let nonces = plan.operations().iter().filter(|operation| takes_nonce(**operation)).count();
    let associated = descriptor.associated > 0;
    let Descriptor { input_segments, output_segments, reserved, .. } = *descriptor;
    let many = usize::from(input_segments.max(output_segments)) > SEGMENTS;
    if nonces > 1 && !is_management(&operations[0])
        || associated && !takes_associated(operations[0])
        || descriptor.associated > descriptor.input_length
        || descriptor.input_length > LARGEST
        || descriptor.output_length > LARGEST
        || many
        || reserved != 0
    {
        return Err(OperationStatus::InvalidField);
    }
    Ok(plan)
}

/// A descriptor that waits: for a word, and not for ever.
fn check_wait(descriptor: &Descriptor) -> Result<(), OperationStatus> {
    let word = descriptor.input_length == 4
        && descriptor.input.is_multiple_of(4)
        && descriptor.input_segments == 0;
    let nothing = descriptor.output_length == 0 && descriptor.reserved == 0;
    let in_time = (1..=LONGEST_WAIT).contains(&descriptor.associated);
    if word && nothing && in_time { Ok(()) } else { Err(OperationStatus::InvalidField) }
}

/// The contexts of a descriptor's operations, by stage.
pub type StageContexts = [Option<Arc<Context>>; STAGES];

/// The contexts that a checked descriptor names.
///
/// # Errors
/// The status that the descriptor ends with: one is not there.
pub fn contexts(
    plan: &CheckedDescriptor,
    descriptor: &Descriptor,
    contexts: &Contexts,
) -> Result<StageContexts, OperationStatus> {
    let mut found = StageContexts::default();
    for (place, handle) in found.iter_mut().zip(&descriptor.contexts[..plan.stages]) {
        if *handle != 0 {
            *place = Some(contexts.get(*handle).ok_or(OperationStatus::InvalidContext)?);
        }
    }
    Ok(found)
}

/// Begins the engines of a checked descriptor. They take memory, so they are begun when one is to work, and not while
/// operations wait. The first `done` bytes were done in an earlier life, where the pipeline
/// [keeps the length](CheckedDescriptor::keeps_length).
///
/// # Errors
/// The status that the descriptor ends with.
pub fn start(
    plan: &CheckedDescriptor,
    descriptor: &Descriptor,
    contexts: &StageContexts,
    done: usize,
    spare: &mut Spare,
) -> Result<Pipeline, OperationStatus> {
    let Descriptor { nonce, associated, input_length, .. } = *descriptor;
    let request = |nth: usize| {
        let associated = if nth == 0 { associated } else { 0 };
        let context = contexts.get(nth).and_then(Option::as_ref);
        let length = (nth == 0).then_some(input_length as usize);
        OperationRequest { nonce, associated, context, done, length }
    };
    Pipeline::begin(plan.operations(), request, spare)
}

/// How a message's memory is found: what is moved is counted as soon as it is looked up for that, once for each operation.
type Lookup = fn(&DmaSpace, u64, usize, Access) -> Result<PinnedPieces, DmaFault>;
const TO_MOVE: Lookup = DmaSpace::pin_pieces;
/// It was looked up before, or will be when it is moved.
const TO_CHECK: Lookup = DmaSpace::pin_uncounted;

/// The memory of a descriptor's input and output, all of it, which is moved from and to there.
///
/// # Errors
/// The status that the descriptor ends with.
pub fn memory(
    dma: &DmaSpace,
    descriptor: &Descriptor,
) -> Result<(Gather, Gather), OperationStatus> {
    Ok((input(dma, descriptor, TO_MOVE)?, output(dma, descriptor, TO_MOVE)?))
}

/// The same once more, for an operation that is under way when what is mapped has changed.
///
/// # Errors
/// As [`memory`].
pub fn memory_again(
    dma: &DmaSpace,
    descriptor: &Descriptor,
) -> Result<(Gather, Gather), OperationStatus> {
    Ok((input(dma, descriptor, TO_CHECK)?, output(dma, descriptor, TO_CHECK)?))
}

/// The memory of an input that is moved now. That of its output is there as well.
///
/// # Errors
/// As [`memory`].
pub fn memory_to_read(dma: &DmaSpace, descriptor: &Descriptor) -> Result<Gather, OperationStatus> {
    let found = input(dma, descriptor, TO_MOVE)?;
    output(dma, descriptor, TO_CHECK).map(|_| found)
}

/// The memory of an output that is moved now.
///
/// # Errors
/// As [`memory`].
pub fn memory_to_write(dma: &DmaSpace, descriptor: &Descriptor) -> Result<Gather, OperationStatus> {
    output(dma, descriptor, TO_MOVE)
}

fn input(dma: &DmaSpace, descriptor: &Descriptor, find: Lookup) -> Result<Gather, OperationStatus> {
    let Descriptor { input, input_length, input_segments, .. } = *descriptor;
    range(dma, (input, input_length), input_segments, (Access::READ, find))
}

fn output(
    dma: &DmaSpace,
    descriptor: &Descriptor,
    find: Lookup,
) -> Result<Gather, OperationStatus> {
    let Descriptor { output, output_length, output_segments, .. } = *descriptor;
    range(dma, (output, output_length), output_segments, (Access::WRITE, find))
}

/// As [`memory`] where each of the two is in one place: borrowed, as long as nothing is mapped otherwise. What is moved is
/// [counted](count_moved) when the operation has ended so.
pub fn borrowed_memory<'a>(
    dma: &'a DmaSpace,
    descriptor: &Descriptor,
) -> Option<(DmaSlice<'a>, DmaSlice<'a>)> {
    let Descriptor { input, output, input_length, output_length, .. } = *descriptor;
    if has_lists(descriptor) {
        return None;
    }
    let place = |address, length: u32, access| match length {
        0 => Some(DmaSlice::default()),
        _ => dma.slice_uncounted(address, length as usize, access),
    };
    Some((place(input, input_length, Access::READ)?, place(output, output_length, Access::WRITE)?))
}

/// Counts what an operation has moved whose memory was [borrowed](borrowed_memory).
#[inline]
pub fn count_moved(dma: &DmaSpace, descriptor: &Descriptor) {
    let Descriptor { input, output, input_length, output_length, .. } = *descriptor;
    dma.count_moved(input, input_length as usize, Access::READ);
    dma.count_moved(output, output_length as usize, Access::WRITE);
}

/// Whether a descriptor's input or output is in several places.
pub fn has_lists(descriptor: &Descriptor) -> bool {
    descriptor.input_segments > 0 || descriptor.output_segments > 0
}

fn range(
    dma: &DmaSpace,
    (address, length): (u64, u32),
    segments: u16,
    (access, find): (Access, Lookup),
) -> Result<Gather, OperationStatus> {
    let mut gather = Gather::of(dma.revoker());
    let mut add = |address: u64, length: u32| {
        if length > 0 {
            let range = find(dma, address, length as usize, access);
            gather.append(range.map_err(|_| OperationStatus::Transfer)?);
        }
        Ok(())
    };
    if segments == 0 {
        add(address, length)?;
        return Ok(gather);
    }
    let mut list = vec![0; usize::from(segments) * size_of::<SglEntry>()];
    dma.read(address, &mut list).map_err(|_| OperationStatus::Transfer)?;
    let mut left = length;
    for entry in list.chunks_exact(size_of::<SglEntry>()) {
        let segment: SglEntry = zerocopy::FromBytes::read_from_bytes(entry)
            .map_err(|_| OperationStatus::InvalidField)?;
        if segment.reserved != 0 || segment.length > left {
            return Err(OperationStatus::InvalidField);
        }
        add(segment.address, segment.length)?;
        left -= segment.length;
    }
    // A list is of as many bytes as the descriptor says.
    if left == 0 { Ok(gather) } else { Err(OperationStatus::InvalidField) }
}
