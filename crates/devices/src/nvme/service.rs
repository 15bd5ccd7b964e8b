//! The loop over the queues: commands in, completions out.
//!
//! A completion entry is kept free for every command that is taken, so completion queues never
//! overflow; doorbells in shared memory are looked at when they matter, and as rarely as possible.

use rackbus_pci::Bus;
use rackbus_spec::nvme::features as fid;
use rackbus_spec::nvme::{Cqe, IoOpcode, Sqe, Status};

use super::arbitration::TurnEnd;
use super::controller::{CommandOutcome, Nvme};
use super::io::deallocates;
use super::jobs::makes_zeroes;
use super::polled::DoorbellKind;
use super::queue::{CompletionQueue, SubmissionQueue};
use super::shadow::ShadowValue;
use super::state::HeldCompletion;

/// Entries of a queue that are asked to come near at once.
const PREFETCHED: u16 = 64;
/// How far ahead of the copy data is asked to come near.
const LOOKAHEAD: u16 = 2;

impl Nvme {
    /// Looks at a submission queue's doorbell, in the shadow page or in registers that are memory.
    #[inline]
    fn refresh_tail(&mut self, qid: u16) {
        let values = self.state.shadow.as_ref().and_then(|pages| pages.values.as_ref());
        let Some(queue) = self.state.sqs[usize::from(qid)].as_mut() else {
            return;
        };
        match queue.doorbell.look(values) {
            ShadowValue::Same => {}
            ShadowValue::Moved(tail) => queue.doorbell.set(tail),
            ShadowValue::Invalid => {
                self.state.events.raise(fid::EVENT_ERROR, fid::ERROR_INVALID_DOORBELL_VALUE);
            }
        }
        if let Some(polled) = &mut self.polled
            && let Some(value) = polled.new_doorbell(qid, DoorbellKind::Tail)
            && (values.is_none() || !queue.doorbell.is_shadowed())
            && !queue.doorbell.take(value)
        {
            self.state.events.raise(fid::EVENT_ERROR, fid::ERROR_INVALID_DOORBELL_VALUE);
        }
    }

    /// Looks at a completion queue's doorbell, in the shadow page or in registers that are memory.
    pub(super) fn refresh_head(&mut self, qid: u16) {
        let pages = self.state.shadow.as_ref();
        let Some(queue) = self.state.cqs[usize::from(qid)].as_mut() else {
            return;
        };
        match queue.doorbell.look(pages.and_then(|pages| pages.values.as_ref())) {
            ShadowValue::Same => {}
            ShadowValue::Moved(head) if queue.accepts_head(u32::from(head)) => {
                queue.doorbell.set(head)
            }
            ShadowValue::Moved(_) | ShadowValue::Invalid => {
                self.state.events.raise(fid::EVENT_ERROR, fid::ERROR_INVALID_DOORBELL_VALUE);
            }
        }
        if let Some(polled) = &mut self.polled
            && let Some(value) = polled.new_doorbell(qid, DoorbellKind::Head)
            && (pages.is_none_or(|pages| pages.values.is_none()) || !queue.doorbell.is_shadowed())
            && !(queue.accepts_head(value) && queue.doorbell.take(value))
        {
            self.state.events.raise(fid::EVENT_ERROR, fid::ERROR_INVALID_DOORBELL_VALUE);
        }
        if queue.wants_refresh() {
            queue.doorbell.keep_away(pages.and_then(|pages| pages.events.as_ref()));
        }
    }

    /// Gives queues their turns.
    #[inline]
    pub(super) fn poll_queues(&mut self, bus: &Bus<'_>) -> u32 {
        if !self.meter.is_ready(bus.now_ns) || self.state.jobs.is_full() {
            return self.administer(bus);
        }
        let mut done = 0;
        if !self.state.zeroing.is_empty() {
            self.forget_who_does_not_wait();
        }
        self.arbiter.begin(self.state.active_count());
        while let Some(index) = self.arbiter.next() {
            let (taken, end) = match self.state.active(index) {
                Some(qid) => self.poll_queue(bus, qid),
                // The last command deleted queues.
                None => (0, TurnEnd::Idle),
            };
            self.arbiter.end(end);
            done += taken;
        }
        done
    }

    /// Gives the admin queue alone its turn: the drive's limits hold back I/O, or its medium does.
    fn administer(&mut self, bus: &Bus<'_>) -> u32 {
        self.arbiter.only(self.state.active_count(), 0);
        let (done, _) = self.poll_queue(bus, 0);
        for index in 1..self.state.active_count() {
            if let Some(qid) = self.state.active(index) {
                self.refresh_tail(qid);
            }
        }
        done
    }

    /// When commands that wait for the drive's limits may continue, if any do.
    #[inline]
    pub(super) fn limit(&mut self, bus: &Bus<'_>) -> Option<u64> {
        if self.meter.is_ready(bus.now_ns) || !self.state.has_pending_io() {
            return None;
        }
        Some(self.meter.delay())
    }

    /// Takes commands from one queue and executes them; returns how many.
    #[inline]
    fn poll_queue(&mut self, bus: &Bus<'_>, qid: u16) -> (u32, TurnEnd) {
        self.refresh_tail(qid);
        let Some(queue) = self.state.sq(qid) else {
            return (0, TurnEnd::Idle);
        };
        let (pending, cqid) = (queue.pending(), queue.cqid);
        if pending == 0 || queue.deletion.is_some() {
            return (0, TurnEnd::Idle);
        }
        if !self.state.is_reachable(queue) {
            self.state.out_of_reach(bus.dma, qid, bus.now_ns);
            return (0, TurnEnd::Idle);
        }
        // First, so that the look at the user takes no time of its own.
        queue.prefetch(pending.min(PREFETCHED));
        self.counts.begin(bus.user.before_access());
        let room = self.make_room(cqid, pending);
        let events = self.state.shadow.as_ref().and_then(|pages| pages.events.as_ref());
        if let Some(queue) = self.state.sqs[usize::from(qid)].as_mut() {
            queue.doorbell.keep_away(events);
        }
        let count = pending.min(room);
        let (taken, stopped) = self.take(bus, qid, count);
        self.counts.end(bus.user.ticks());
        (taken, stopped.unwrap_or(TurnEnd::Idle))
    }

    /// Entries that the completion queue has for new commands; asks the host's doorbell only when
    /// those known are not enough, or its event index has to be moved on.
    #[inline]
    fn make_room(&mut self, cqid: u16, wanted: u16) -> u16 {
        let Some(queue) = self.state.cq(cqid) else {
            return 0;
        };
        if queue.room() >= wanted && !queue.wants_refresh() {
            return queue.room();
        }
        self.refresh_head(cqid);
        self.state.cq(cqid).map_or(0, CompletionQueue::room)
    }

    /// Fetches and executes up to `count` commands of a queue; returns how many, and why not all.
    #[inline]
    fn take(&mut self, bus: &Bus<'_>, qid: u16, count: u16) -> (u32, Option<TurnEnd>) {
        for left in (1..=count).rev() {
            let taken = u32::from(count - left);
            if qid == 0 && self.state.jobs.is_full_of_admin() {
                // The others have their turns.
                return (taken, Some(TurnEnd::Idle));
            }
            if qid != 0 && self.state.jobs.is_full() {
                return (taken, Some(TurnEnd::Blocked));
            }
            if !self.arbiter.may_continue() {
                return (taken, Some(TurnEnd::More));
            }
            if qid != 0 && !self.meter.is_ready(bus.now_ns) {
                return (taken, Some(TurnEnd::Blocked));
            }
            if qid != 0 && self.must_wait_to_zero(qid) {
                // This queue alone waits.
                return (taken, Some(TurnEnd::Idle));
            }
            self.look_ahead(qid, left);
            let queue = self.state.sqs[usize::from(qid)].as_mut();
            let Some(sqe) = queue.and_then(SubmissionQueue::fetch) else {
                return (taken, None);
            };
            self.cost = 0;
            let outcome = if qid == 0 { self.admin(bus, &sqe) } else { self.io(bus, qid, &sqe) };
            self.arbiter.spend(self.cost);
            if qid != 0 {
                // What only gives space back moves no data.
                self.meter.spend(if deallocates(&sqe) { 0 } else { self.cost });
            }
            match outcome {
                CommandOutcome::Done(status, dw0) => {
                    self.complete(bus, qid, &sqe, status, dw0);
                    self.counts.done(qid, &sqe, status.is_success());
                }
                CommandOutcome::Outstanding => {}
                CommandOutcome::Background => self.reserve(qid),
            }
        }
        (u32::from(count), None)
    }

    /// Whether the next command of a queue makes ranges zeroes and has to wait until fewer are under way, or for other
    /// queues that waited before it.
    #[inline]
    fn must_wait_to_zero(&mut self, qid: u16) -> bool {
        let free = !self.state.jobs.are_mostly_zeroing();
        if free && self.state.zeroing.is_empty() || !self.zeroes_follow(qid) {
            return false;
        }
        !self.state.zeroing.may_take(qid, free)
    }

    /// A queue whose command cannot be taken for another reason, or is another one by now, keeps no other waiting.
    fn forget_who_does_not_wait(&mut self) {
        let mut zeroing = std::mem::take(&mut self.state.zeroing);
        zeroing.keep(|qid| {
            let queue = self.state.sq(qid).filter(|queue| queue.pending() > 0);
            let able = queue.filter(|it| it.deletion.is_none() && self.state.is_reachable(it));
            let room = able.and_then(|queue| self.state.cq(queue.cqid)).map(CompletionQueue::room);
            room.is_some_and(|room| room > 0) && self.zeroes_follow(qid)
        });
        self.state.zeroing = zeroing;
    }

    /// Whether the next command of a queue makes ranges zeroes. The host may still change it, and be kept waiting by
    /// what it changed.
    fn zeroes_follow(&self, qid: u16) -> bool {
        let next = self.state.sq(qid).and_then(|queue| queue.peek(0));
        next.is_some_and(|sqe| makes_zeroes(IoOpcode::from_u8(sqe.cdw0.opcode())))
    }

    /// Asks for the data of a command to come near that is executed soon; `left` are pending.
    #[inline]
    fn look_ahead(&self, qid: u16, left: u16) {
        if qid == 0 || left <= LOOKAHEAD {
            return;
        }
        let Some(sqe) = self.state.sq(qid).and_then(|queue| queue.peek(LOOKAHEAD)) else {
            return;
        };
        if let Some((offset, length)) = self.identity.geometry.range(sqe.slba(), 1) {
            self.backing.prefetch(offset, (length as usize).max(4096));
        }
    }

    /// Posts the completion of a command of queue `qid`.
    #[inline]
    pub(super) fn complete(
        &mut self,
        bus: &Bus<'_>,
        qid: u16,
        sqe: &Sqe,
        status: Status,
        dw0: u32,
    ) {
        let mut status = status;
        if !status.is_success() {
            status = status.more();
            self.state.logs.record(qid, sqe.cdw0.cid(), status, Some(sqe));
        }
        self.post(bus, qid, sqe.cdw0.cid(), status, dw0);
    }

    #[inline]
    fn post(&mut self, bus: &Bus<'_>, qid: u16, cid: u16, status: Status, dw0: u32) {
        let Some(sq) = self.state.sqs[usize::from(qid)].as_ref() else {
            return;
        };
        let cqe =
            Cqe { dw0, dw1: 0, sq_head: sq.head(), sq_id: qid, cid, status_phase: status.0 << 1 };
        let Some(queue) = self.state.cqs[usize::from(sq.cqid)].as_mut() else {
            return;
        };
        if queue.post(cqe) {
            if queue.interrupts {
                self.state.vectors.posted(queue.vector, bus.now_ns, queue.id == 0);
            }
        } else {
            // Its entry stays kept until the queue can be reached again.
            queue.reserve();
            self.state.held.push(HeldCompletion { qid, cid, status, dw0 });
            self.state.out_of_reach(bus.dma, qid, bus.now_ns);
        }
    }

    /// Posts the completions of commands that ended while their queue was out of reach.
    pub(super) fn post_held(&mut self, bus: &Bus<'_>) {
        bus.user.before_access();
        let held = std::mem::take(&mut self.state.held);
        for &HeldCompletion { qid, cid, status, dw0 } in &held {
            self.release(qid);
            self.post(bus, qid, cid, status, dw0);
        }
        // Not before all are posted or held again: a queue that is deleted has no completions left.
        for HeldCompletion { qid, .. } in held {
            self.finish_deletion(bus, qid);
        }
    }

    /// Keeps a completion entry for a command of queue `qid`.
    #[inline]
    pub(super) fn reserve(&mut self, qid: u16) {
        let cqid = self.state.sq(qid).map(|queue| queue.cqid);
        if let Some(queue) = cqid.and_then(|cqid| self.state.cq_mut(cqid)) {
            queue.reserve();
        }
    }

    /// Gives back the completion entry kept for a command of queue `qid`.
    pub(super) fn release(&mut self, qid: u16) {
        let cqid = self.state.sq(qid).map(|queue| queue.cqid);
        if let Some(queue) = cqid.and_then(|cqid| self.state.cq_mut(cqid)) {
            queue.release();
        }
    }

    /// Completes event requests for which there is something to tell.
    pub(super) fn tell_events(&mut self, bus: &Bus<'_>) -> u32 {
        let mut told = 0;
        bus.user.before_access();
        while self.state.events.has_next()
            && self.state.cq(0).is_some_and(|queue| queue.reachable() && queue.room() > 0)
        {
            if let Some(cid) = self.state.events.next_aborted() {
                self.post(bus, 0, cid, Status::ABORT_REQUESTED, 0);
            } else if let Some((cid, event)) = self.state.events.next() {
                self.post(bus, 0, cid, Status::SUCCESS, event.into());
            }
            told += 1;
        }
        told
    }
}
