//! Several queue pairs of one drive. With one command in flight in each it is known where the completion of each will
//! be, so that other functions can wait for it while the drive works on all of them.

use rackbus_spec::nvme::features::{NUMBER_OF_QUEUES, NumberOfQueues};
use rackbus_spec::nvme::{AdminOpcode, Sqe};

use super::admin::Admin;
use super::{Drive, IO_SQ};
use crate::DriveError;
use crate::device::DrivenFunction;
use crate::queue::{CQ_FACTOR, DriveQueue, PAGE, PairLayout, ring_entries};

/// Where so many queue pairs lie in the shared memory, one at least, and where the data begins behind them.
pub(super) fn place_pairs(depth: u16, queues: u16) -> (Vec<PairLayout>, usize) {
    let entries = ring_entries(depth);
    let ring = (usize::from(entries) * 64).next_multiple_of(PAGE);
    let pair = ring + (usize::from(entries * CQ_FACTOR) * 16).next_multiple_of(PAGE);
    let queues = queues.max(1);
    let place = |nth: u16| {
        let sq = IO_SQ + usize::from(nth) * pair;
        PairLayout { id: nth + 1, sq, cq: sq + ring, entries, depth, dstrd: 0, shadow: None }
    };
    ((0..queues).map(place).collect(), IO_SQ + usize::from(queues) * pair)
}

impl Admin<'_> {
    /// Asks for so many queue pairs (NVM Express base 1.4, section 5.21.1.7); how many of them there may be.
    pub(super) fn request_queues(&mut self, queues: u16) -> Result<u16, DriveError> {
        let asked = NumberOfQueues::new().with_nsq(queues - 1).with_ncq(queues - 1);
        let sqe = Sqe { cdw10: u32::from(NUMBER_OF_QUEUES), cdw11: asked.into(), ..Sqe::default() };
        let done = self.ask("number of queues", sqe, AdminOpcode::SetFeatures)?;
        let granted = NumberOfQueues::from(done.dw0);
        Ok(granted.nsq().min(granted.ncq()).saturating_add(1).min(queues))
    }
}

impl Drive {
    /// How many queues the drive is used with.
    pub fn queues(&self) -> usize {
        1 + self.others.len()
    }

    /// One of the queues, by its place among them, with the device that it is used with.
    pub fn queue(&mut self, nth: usize) -> Option<(&mut DriveQueue, &mut dyn DrivenFunction)> {
        if nth == 0 {
            // Who takes the queue takes what still completes of a request that failed.
            self.late = false;
        }
        self.pair(nth)
    }

    /// The same for who leaves what still completes of a request that failed to the next request.
    pub(crate) fn pair(
        &mut self,
        nth: usize,
    ) -> Option<(&mut DriveQueue, &mut dyn DrivenFunction)> {
        let queue = match nth.checked_sub(1) {
            None => &mut self.queue,
            Some(nth) => self.others.get_mut(nth)?,
        };
        Some((queue, &mut *self.device))
    }

    /// Commands in flight are of nobody who waits for them, and use memory for data: the next request takes their
    /// completions first.
    pub(crate) fn abandon(&mut self) {
        self.late |= self.in_flight() > 0;
    }

    /// Commands in flight in all queues.
    fn in_flight(&self) -> usize {
        self.queue.in_flight() + self.others.iter().map(DriveQueue::in_flight).sum::<usize>()
    }

    /// Takes the completions of what nobody waits for.
    pub(super) fn take_late(&mut self) -> Result<(), DriveError> {
        self.device.progress();
        for queue in std::iter::once(&mut self.queue).chain(&mut self.others) {
            while queue.poll(&mut *self.device)?.is_some() {}
        }
        self.late = self.in_flight() > 0;
        Ok(())
    }
}
