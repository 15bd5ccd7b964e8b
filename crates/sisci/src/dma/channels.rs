//! DMA channels: asked for, assigned to queues, given back.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::DmaQueue;
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_adapter, check_flags, fail};
use crate::handles::{HandleKind, RawHandle, find, kind};
use crate::library::Child;
use crate::query::DMA_CHANNELS;

/// Sorts of engine that a program may ask for (`sci_dma_type_t`); all but the last are the one.
const DONT_CARE: u32 = 1;
const SYSTEM: u32 = 4;
const TRANSPARENT: u32 = 5;

/// Who has each channel: 0 nobody, [`ALONE`], or how many share it.
static USED: [AtomicU32; DMA_CHANNELS as usize] = [const { AtomicU32::new(0) }; 4];
const ALONE: u32 = u32::MAX;

/// Nobody has a channel any more: what has is another process'.
pub(super) fn forget_users() {
    USED.iter().for_each(|used| used.store(0, Ordering::Release));
}

/// A channel of the copy engine that a program asked for (`sci_dma_channel_t`).
#[derive(Debug)]
pub struct DmaChannel {
    number: u32,
    /// Queues that it is assigned to.
    pub(super) queues: AtomicUsize,
    _child: Child,
}
kind!(DmaChannel, 11);

impl Drop for DmaChannel {
    fn drop(&mut self) {
        let give_back = |users: u32| Some(if users == ALONE { 0 } else { users.saturating_sub(1) });
        if let Some(used) = USED.get(self.number as usize) {
            // The closure always gives a value.
            let _ = used.fetch_update(Ordering::AcqRel, Ordering::Acquire, give_back);
        }
    }
}

pub(super) fn request(
    sd: RawHandle,
    adapter: u32,
    kind: u32,
    number: u32,
    flags: u32,
) -> SciResult<RawHandle> {
    check_flags(flags, SCI_FLAG_DMA_CHANNEL_SHARED)?;
    check_adapter(adapter)?;
    match kind {
        DONT_CARE..=SYSTEM => {}
        TRANSPARENT => return fail(SCI_ERR_DMA_NOT_AVAILABLE),
        _ => return fail(SCI_ERR_ILLEGAL_PARAMETER),
    }
    let child = Child::of(sd)?;
    let share = flags & SCI_FLAG_DMA_CHANNEL_SHARED != 0;
    let take = |number: &u32| {
        let take = |users: u32| match (users, share) {
            (0, false) => Some(ALONE),
            (ALONE, _) | (_, false) => None,
            (users, true) => Some(users + 1),
        };
        let used = USED.get(*number as usize);
        used.is_some_and(|it| it.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok())
    };
    let number = match number {
        SCI_DMA_CHANNEL_ID_DONTCARE => (0..DMA_CHANNELS).find(take),
        number => Some(number).filter(take),
    };
    let Some(number) = number else { return fail(SCI_ERR_DMA_NOT_AVAILABLE) };
    let queues = AtomicUsize::new(0);
    Ok(DmaChannel::table().add(|_| DmaChannel { number, queues, _child: child }))
}

pub(super) fn assign(channel: RawHandle, queue: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let (channel, queue) = (find::<DmaChannel>(channel)?, find::<DmaQueue>(queue)?);
    queue.unassign();
    channel.queues.fetch_add(1, Ordering::AcqRel);
    queue.channel.store(channel.number, Ordering::Release);
    *queue.assigned.lock().unwrap_or_else(PoisonError::into_inner) = Some(channel);
    Ok(())
}

pub(super) fn give_back(channel: RawHandle) -> SciResult<()> {
    if find::<DmaChannel>(channel)?.queues.load(Ordering::Acquire) > 0 {
        return fail(SCI_ERR_BUSY);
    }
    DmaChannel::table().take(channel).map(drop).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))
}

/// That a segment is to be used with a channel; there is nothing to prepare.
pub(super) fn known<T: HandleKind>(
    channel: RawHandle,
    segment: RawHandle,
    flags: u32,
) -> SciResult<()> {
    check_flags(flags, 0)?;
    find::<DmaChannel>(channel)?;
    find::<T>(segment).map(drop)
}
