//! I/O commands: the NVM command set (NVM Express base 1.4, section 6).

use rackbus_memory::{PinnedSlice, SharedMemory};
use rackbus_pci::Bus;
use rackbus_spec::nvme::command::{DsmCdw11, IoOpcode, RwCdw12};
use rackbus_spec::nvme::data::{DSM_MAX_RANGES, DsmRange};
use rackbus_spec::nvme::{NSID_ALL, Sqe, Status};
use zerocopy::{FromZeros, IntoBytes};

use super::backing::{InlineResult, MediaError, MediumRequest};
use super::controller::{CommandOutcome, Nvme};
use super::identify::{MAX_TRANSFER, NSID};
use super::jobs::{CommandJob, CompareSides, Finish, JobStep, Owner, Steps};
use super::transfer::DataDirection;

/// Parts of Verify commands that are started at once, of up to [`MAX_TRANSFER`] each: about what the commands of a poll
/// may be about.
const PARTS: usize = 4;

/// A checked range of the drive, in bytes.
#[derive(Debug, Clone, Copy)]
struct Extent {
    offset: u64,
    length: u64,
}

impl Nvme {
    /// Executes a command of I/O queue `sq`.
    #[inline]
    pub(super) fn io(&mut self, bus: &Bus<'_>, sq: u16, sqe: &Sqe) -> CommandOutcome {
        let outcome = match IoOpcode::from_u8(sqe.cdw0.opcode()) {
            _ if sqe.cdw0.fuse() != 0 => Err(Status::INVALID_FIELD.do_not_retry()),
            None => Err(Status::INVALID_OPCODE.do_not_retry()),
            Some(IoOpcode::Flush) if sqe.nsid == NSID_ALL => self.flush(sq, sqe),
            Some(_) if sqe.nsid != NSID => Err(Status::INVALID_NAMESPACE.do_not_retry()),
            Some(IoOpcode::Read) => self.read(bus, sq, sqe),
            Some(IoOpcode::Write) => self.write(bus, sq, sqe),
            Some(IoOpcode::Flush) => self.flush(sq, sqe),
            Some(IoOpcode::Compare) => self.compare(bus, sq, sqe),
            Some(IoOpcode::Verify) => self.verify(sq, sqe),
            Some(IoOpcode::WriteZeroes) => self.write_zeroes(sq, sqe),
            Some(IoOpcode::DatasetManagement) => self.dataset_management(bus, sq, sqe),
        };
        outcome.unwrap_or_else(CommandOutcome::failed)
    }

    /// The range that dwords 10 to 12 name.
    #[inline]
    fn extent(&self, sqe: &Sqe) -> Result<Extent, Status> {
        let blocks = u64::from(RwCdw12::from(sqe.cdw12).nlb()) + 1;
        match self.identity.geometry.range(sqe.slba(), blocks) {
            Some((offset, length)) => Ok(Extent { offset, length }),
            None => Err(Status::LBA_OUT_OF_RANGE.do_not_retry()),
        }
    }

    /// As [`extent`](Nvme::extent), for commands that move data.
    #[inline]
    fn data_extent(&self, sqe: &Sqe) -> Result<Extent, Status> {
        let extent = self.extent(sqe)?;
        if extent.length > MAX_TRANSFER {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        Ok(extent)
    }

    #[inline]
    fn parse(
        &mut self,
        bus: &Bus<'_>,
        sqe: &Sqe,
        length: u64,
        direction: DataDirection,
    ) -> Result<(), Status> {
        let page = self.state.registers.page_size();
        self.cost = length;
        self.transfer.parse(bus.dma, sqe, length as usize, page, true, direction)
    }

    /// Read (section 6.9). With FUA, what the cache has of the range is written back first or,
    /// as here, before the command completes.
    #[inline]
    fn read(&mut self, bus: &Bus<'_>, sq: u16, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let Extent { offset, length } = self.data_extent(sqe)?;
        self.parse(bus, sqe, length, DataDirection::ToHost)?;
        let backing = &mut self.backing;
        let attempt = self
            .transfer
            .with_slices(bus.dma, |into| backing.attempt(&MediumRequest::Read { offset, into }))?;
        let fua = RwCdw12::from(sqe.cdw12).fua();
        match attempt {
            InlineResult::Done(Err(error)) => Err(error.into()),
            InlineResult::Done(Ok(())) => {
                self.state.logs.count_read(length);
                if fua { self.flush(sq, sqe) } else { Ok(CommandOutcome::DONE) }
            }
            InlineResult::WouldBlock => {
                let into = self.transfer.pin(bus.dma)?;
                let mut steps = Steps::from([MediumRequest::Read { offset, into }]);
                if fua {
                    steps.push_back(MediumRequest::Flush);
                }
                self.state.logs.count_read(length);
                Ok(self.start(Owner::Command(sq, *sqe), steps, Finish::Plain))
            }
        }
    }

    /// Write (section 6.15).
    #[inline]
    fn write(&mut self, bus: &Bus<'_>, sq: u16, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let Extent { offset, length } = self.data_extent(sqe)?;
        self.parse(bus, sqe, length, DataDirection::FromHost)?;
        let durable = self.must_be_durable(sqe);
        let backing = &mut self.backing;
        let attempt = self.transfer.with_slices(bus.dma, |from| {
            backing.attempt(&MediumRequest::Write { offset, from, durable })
        })?;
        match attempt {
            InlineResult::Done(result) => {
                result?;
                self.state.logs.count_write(length);
                Ok(CommandOutcome::DONE)
            }
            InlineResult::WouldBlock => {
                let from = self.transfer.pin(bus.dma)?;
                self.state.logs.count_write(length);
                let steps = Steps::from([MediumRequest::Write { offset, from, durable }]);
                Ok(self.start(Owner::Command(sq, *sqe), steps, Finish::Plain))
            }
        }
    }

    /// FUA, or a volatile write cache that the host turned off.
    #[inline]
    fn must_be_durable(&self, sqe: &Sqe) -> bool {
        RwCdw12::from(sqe.cdw12).fua() || !self.state.features.write_cache()
    }

    /// Flush (section 6.8).
    fn flush(&mut self, sq: u16, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        self.run(Owner::Command(sq, *sqe), Steps::from([MediumRequest::Flush]), Finish::Plain)
    }

    /// Compare (section 6.6).
    fn compare(&mut self, bus: &Bus<'_>, sq: u16, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let Extent { offset, length } = self.data_extent(sqe)?;
        self.parse(bus, sqe, length, DataDirection::FromHost)?;
        let host = self.transfer.pin(bus.dma)?;
        let (drive, read) = scratch(offset, length)?;
        self.state.logs.count_read(length);
        let comparison = CompareSides { host, drive };
        let into = comparison.drive.whole();
        match self.backing.attempt(&MediumRequest::Read { offset, into: &[into] }) {
            InlineResult::Done(result) => {
                result?;
                comparison.check()?;
                Ok(CommandOutcome::DONE)
            }
            InlineResult::WouldBlock => {
                let owner = Owner::Command(sq, *sqe);
                Ok(self.start(owner, Steps::from([read]), Finish::Compare(comparison)))
            }
        }
    }

    /// Verify (section 6.14): reads and moves nothing, so that it may be longer than a transfer. It is read in parts, of
    /// which one at most is read here: the others of the drive do not wait for as long as many take.
    fn verify(&mut self, sq: u16, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let Extent { offset, length } = self.extent(sqe)?;
        self.cost = length;
        let part = |at: u64| (length - at).min(MAX_TRANSFER);
        let mut read = 0;
        while read < length {
            let into = self.transfer.discard(part(read)).ok_or(Status::INTERNAL_ERROR)?;
            let request = MediumRequest::Read { offset: offset + read, into: &[into.get()][..] };
            match self.backing.attempt(&request) {
                InlineResult::Done(result) => result?,
                InlineResult::WouldBlock => break,
            }
            read += part(read);
            if self.backing.background().is_some() {
                break;
            }
        }
        if read == length {
            return Ok(CommandOutcome::DONE);
        }
        let mut steps = Steps::new();
        while read < length {
            let into = self.transfer.discard(part(read)).ok_or(Status::INTERNAL_ERROR)?;
            steps.push_back(MediumRequest::Read { offset: offset + read, into: vec![into] });
            read += part(read);
        }
        Ok(self.start(Owner::Command(sq, *sqe), steps, Finish::Plain))
    }

    /// Write Zeroes (section 6.17).
    fn write_zeroes(&mut self, sq: u16, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let Extent { offset, length } = self.extent(sqe)?;
        self.cost = length;
        let deallocate = deallocates(sqe);
        let mut steps = Steps::from([MediumRequest::Zero { offset, length, deallocate }]);
        if self.must_be_durable(sqe) {
            steps.push_back(MediumRequest::Flush);
        }
        self.run(Owner::Command(sq, *sqe), steps, Finish::Plain)
    }

    /// Dataset Management (section 6.7): ranges to deallocate; the hints are ignored. All ranges
    /// are checked before the first is deallocated.
    fn dataset_management(
        &mut self,
        bus: &Bus<'_>,
        sq: u16,
        sqe: &Sqe,
    ) -> Result<CommandOutcome, Status> {
        let count = (sqe.cdw10 & 0xff) as usize + 1;
        let mut ranges = [DsmRange::new_zeroed(); DSM_MAX_RANGES];
        let bytes = ranges[..count].as_mut_bytes();
        self.parse(bus, sqe, bytes.len() as u64, DataDirection::FromHost)?;
        self.transfer.copy_to(bus.dma, bytes)?;
        if !DsmCdw11::from(sqe.cdw11).ad() {
            return Ok(CommandOutcome::DONE);
        }
        let mut steps = Steps::with_capacity(count);
        for range in &ranges[..count] {
            let found = self.identity.geometry.range(range.slba, u64::from(range.nlb));
            let (offset, length) = found.ok_or(Status::LBA_OUT_OF_RANGE.do_not_retry())?;
            if length > 0 {
                self.cost = self.cost.saturating_add(length);
                let deallocate = deallocates(sqe);
                steps.push_back(MediumRequest::Zero { offset, length, deallocate });
            }
        }
        if !self.state.features.write_cache() {
            steps.push_back(MediumRequest::Flush);
        }
        self.run(Owner::Command(sq, *sqe), steps, Finish::Plain)
    }

    /// Does steps that have no buffers, in the background from the first that would block.
    pub(super) fn run(
        &mut self,
        owner: Owner,
        mut steps: Steps,
        finish: Finish,
    ) -> Result<CommandOutcome, Status> {
        while let Some(step) = steps.front() {
            let attempt = match step {
                MediumRequest::Flush => self.backing.attempt(&MediumRequest::Flush),
                MediumRequest::Zero { offset, length, deallocate } => {
                    self.backing.attempt(&MediumRequest::Zero {
                        offset: *offset,
                        length: *length,
                        deallocate: *deallocate,
                    })
                }
                MediumRequest::Read { .. } | MediumRequest::Write { .. } => {
                    InlineResult::WouldBlock
                }
            };
            match attempt {
                InlineResult::Done(result) => result?,
                InlineResult::WouldBlock => return Ok(self.start(owner, steps, finish)),
            }
            steps.pop_front();
        }
        Ok(CommandOutcome::DONE)
    }

    /// Hands the first of `steps` to the background; the others follow as each finishes.
    fn start(&mut self, owner: Owner, mut steps: Steps, finish: Finish) -> CommandOutcome {
        let first = steps.pop_front();
        let (Some(first), Some(background)) = (first, self.backing.background()) else {
            return CommandOutcome::failed(Status::INTERNAL_ERROR);
        };
        let now = JobStep::of(&first);
        let tag = self.state.jobs.insert(CommandJob {
            owner,
            begun: self.counts.begun(),
            now,
            rest: steps,
            finish,
        });
        background.start(tag, first);
        CommandOutcome::Background
    }

    /// Looks at what the background has finished, after something has if `wait`. Returns how many
    /// commands completed, and one more where the look itself was work.
    pub(super) fn reap(&mut self, bus: &Bus<'_>, wait: bool) -> u32 {
        let mut finished = std::mem::take(&mut self.finished);
        let mut done = 0;
        if let Some(background) = self.backing.background() {
            done += u32::from(background.works_in_looks());
            if wait {
                background.wait(&mut finished);
            } else {
                background.reap(&mut finished);
            }
        }
        let ticks = match finished.is_empty() {
            true => 0,
            false => bus.user.before_access(),
        };
        for (tag, result) in finished.drain(..) {
            done += u32::from(self.step_finished(bus, ticks, tag, result));
        }
        self.finished = finished;
        // Whoever waits until no buffers are in use does not wait for all parts of a Verify, which may be many.
        if wait { done } else { done + self.start_parts() }
    }

    /// Starts parts whose turn it is, and returns how many: a poll is bounded by what it starts, too.
    fn start_parts(&mut self) -> u32 {
        let count = self.put_off.len().min(PARTS);
        if let (Some(background), 1..) = (self.backing.background(), count) {
            self.put_off.drain(..count).for_each(|(tag, step)| background.start(tag, step));
            background.submit();
        }
        count as u32
    }

    /// A step of the job with `tag` has finished, as was found at this value of the processor's
    /// counter; true when the whole job has.
    fn step_finished(
        &mut self,
        bus: &Bus<'_>,
        ticks: u64,
        tag: u32,
        result: Result<(), MediaError>,
    ) -> bool {
        if result == Err(MediaError::NotDurable) {
            self.check_health();
        }
        let Some(job) = self.state.jobs.get_mut(tag) else {
            return false;
        };
        if result.is_ok()
            && let Some(next) = job.rest.pop_front()
            && let Some(background) = self.backing.background()
        {
            job.now = JobStep::of(&next);
            if matches!(next, MediumRequest::Read { .. }) {
                self.put_off.push_back((tag, next));
                return false;
            }
            background.start(tag, next);
            background.submit();
            return false;
        }
        let Some(job) = self.state.jobs.remove(tag) else {
            return false;
        };
        let outcome: Result<(), Status> = match (result, &job.finish) {
            (Err(error), Finish::CacheOff) => {
                self.state.features.set_write_cache(true);
                Err(error.into())
            }
            (Err(error), _) => Err(error.into()),
            (Ok(()), Finish::Plain | Finish::CacheOff) => Ok(()),
            (Ok(()), Finish::Compare(comparison)) => comparison.check(),
        };
        match job.owner {
            Owner::Shutdown => self.shutdown_finished(outcome.is_ok()),
            Owner::Command(sq, sqe) => {
                self.release(sq);
                self.counts.done_later(sq, &sqe, outcome.is_ok(), job.begun, ticks);
                self.complete(bus, sq, &sqe, outcome.err().unwrap_or(Status::SUCCESS), 0);
                self.finish_deletion(bus, sq);
            }
        }
        true
    }
}

/// Whether a command gives the space of its ranges back. That counts for nothing against a limit in bytes, wherever the
/// drive's front is: where the blocks are on another node, that node learns it from what the front asks for.
#[inline]
pub(super) fn deallocates(sqe: &Sqe) -> bool {
    match IoOpcode::from_u8(sqe.cdw0.opcode()) {
        Some(IoOpcode::DatasetManagement) => true,
        Some(IoOpcode::WriteZeroes) => RwCdw12::from(sqe.cdw12).deac(),
        _ => false,
    }
}

/// Memory of our own to read `length` bytes from `offset` into, and the request that does.
fn scratch(
    offset: u64,
    length: u64,
) -> Result<(SharedMemory, MediumRequest<Vec<PinnedSlice>>), Status> {
    let memory =
        SharedMemory::create("nvme-scratch", length).map_err(|_| Status::INTERNAL_ERROR)?;
    let into = PinnedSlice::new(memory.region().clone(), 0, memory.len());
    let into = vec![into.ok_or(Status::INTERNAL_ERROR)?];
    Ok((memory, MediumRequest::Read { offset, into }))
}
