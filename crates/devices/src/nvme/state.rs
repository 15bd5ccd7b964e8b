//! Everything the controller knows that does not outlive its user: renewed as a whole when the
//! drive goes to somebody else, so nothing can be forgotten.

use rackbus_memory::DmaSpace;
use rackbus_pci::Mode;
use rackbus_spec::nvme::Status;

use super::arbitration::ZeroingTurns;
use super::events::Events;
use super::features::{Features, IO_QUEUES};
use super::interrupts::Vectors;
use super::jobs::CommandJobs;
use super::logs::Logs;
use super::queue::{CompletionQueue, SubmissionQueue};
use super::registers::NvmeRegisters;
use super::shadow::ShadowPages;

/// The admin queue and the I/O queues.
pub const QUEUES: usize = IO_QUEUES as usize + 1;

/// A completion that waits for its queue.
#[derive(Debug, Clone, Copy)]
pub struct HeldCompletion {
    /// The submission queue of the command.
    pub qid: u16,
    /// Identifier of the command.
    pub cid: u16,
    /// Status that its completion has.
    pub status: Status,
    /// Dword 0 of its completion.
    pub dw0: u32,
}

/// The controller's state between two commands.
#[derive(Debug)]
pub struct ControllerState {
    /// The registers of BAR 0 (section 3.1).
    pub registers: NvmeRegisters,
    /// Values that Set Features changes.
    pub features: Features,
    /// Error information and health.
    pub logs: Logs,
    /// Asynchronous events and the requests that wait for them.
    pub events: Events,
    /// Interrupts not raised yet.
    pub vectors: Vectors,
    /// Submission queues by identifier.
    pub sqs: [Option<SubmissionQueue>; QUEUES],
    /// Completion queues by identifier.
    pub cqs: [Option<CompletionQueue>; QUEUES],
    /// Identifiers of the submission queues there are.
    active: Vec<u16>,
    /// Shadow doorbells, once the driver gave their pages.
    pub shadow: Option<ShadowPages>,
    /// Commands in the background.
    pub jobs: CommandJobs,
    /// Queues that wait until fewer ranges are made zeroes.
    pub zeroing: ZeroingTurns,
    /// The mappings that queues and shadow pages were resolved under.
    pub generation: u64,
    /// Completions whose queue could not be reached.
    pub held: Vec<HeldCompletion>,
    /// The least `unreachable_since` of all queues: asked for in every poll that finds nothing.
    unreachable_since: Option<u64>,
    /// The level of the interrupt pin.
    pub pin: bool,
    /// The kind of interrupts that the driver had enabled at the last look.
    pub mode: Mode,
    /// The engine waits without a timer: interrupts may not be put off over a park.
    pub untimed: bool,
}

impl ControllerState {
    /// As after power-on; logs count time from `now_ns`.
    pub fn new(now_ns: u64) -> Self {
        ControllerState {
            registers: NvmeRegisters::default(),
            features: Features::default(),
            logs: Logs::new(now_ns),
            events: Events::default(),
            vectors: Vectors::default(),
            sqs: [const { None }; QUEUES],
            cqs: [const { None }; QUEUES],
            active: Vec::with_capacity(QUEUES),
            shadow: None,
            jobs: CommandJobs::default(),
            zeroing: ZeroingTurns::default(),
            generation: 0,
            held: Vec::new(),
            unreachable_since: None,
            pin: false,
            mode: Mode::Pin,
            untimed: false,
        }
    }

    /// A controller level reset (NVM Express base 1.4, section 7.3.2): queues, outstanding
    /// requests, features and shadow doorbells go; logs and the admin queue registers stay.
    pub fn reset_controller(&mut self) {
        self.features = Features::default();
        self.events = Events::default();
        self.vectors = Vectors::default();
        self.sqs = [const { None }; QUEUES];
        self.cqs = [const { None }; QUEUES];
        self.active.clear();
        self.shadow = None;
        self.held.clear();
        self.zeroing = ZeroingTurns::default();
        self.unreachable_since = None;
        self.registers.interrupt_mask = 0;
    }

    /// The submission queue with this identifier.
    #[inline]
    pub fn sq(&self, qid: u16) -> Option<&SubmissionQueue> {
        self.sqs.get(usize::from(qid))?.as_ref()
    }

    /// The completion queue with this identifier.
    #[inline]
    pub fn cq(&self, qid: u16) -> Option<&CompletionQueue> {
        self.cqs.get(usize::from(qid))?.as_ref()
    }

    /// As [`cq`](ControllerState::cq), to change.
    #[inline]
    pub fn cq_mut(&mut self, qid: u16) -> Option<&mut CompletionQueue> {
        self.cqs.get_mut(usize::from(qid))?.as_mut()
    }

    /// How many submission queues there are.
    #[inline]
    pub fn active_count(&self) -> usize {
        self.active.len()
    }

    /// The identifier of the submission queue at `index` of those there are.
    #[inline]
    pub fn active(&self, index: usize) -> Option<u16> {
        self.active.get(index).copied()
    }

    /// Whether commands of I/O queues are there that could be taken.
    pub fn has_pending_io(&self) -> bool {
        let queues = self.active.iter().skip(1).filter_map(|qid| self.sq(*qid));
        queues.into_iter().any(|queue| queue.pending() > 0 && queue.deletion.is_none())
    }

    /// Takes a new submission queue in; its completion queue exists.
    pub fn add_sq(&mut self, queue: SubmissionQueue) {
        if let Some(cq) = self.cq_mut(queue.cqid) {
            cq.users += 1;
        }
        self.active.push(queue.id);
        let slot = usize::from(queue.id);
        self.sqs[slot] = Some(queue);
    }

    /// Removes a submission queue.
    pub fn remove_sq(&mut self, qid: u16) {
        let removed = self.sqs.get_mut(usize::from(qid)).and_then(Option::take);
        self.active.retain(|active| *active != qid);
        if let Some(cq) = removed.and_then(|queue| self.cq_mut(queue.cqid)) {
            cq.users = cq.users.saturating_sub(1);
        }
        self.find_unreachable();
    }

    /// Queue `qid` has commands or completions and cannot be reached.
    pub fn out_of_reach(&mut self, dma: &DmaSpace, qid: u16, now_ns: u64) {
        let queue = self.sqs.get_mut(usize::from(qid)).and_then(Option::as_mut);
        let Some(queue) = queue.filter(|queue| queue.unreachable_since.is_none()) else { return };
        queue.unreachable_since = Some(now_ns);
        queue.want(dma);
        let cqid = queue.cqid;
        if let Some(queue) = self.cq(cqid) {
            queue.want(dma);
        }
        self.find_unreachable();
    }

    fn find_unreachable(&mut self) {
        let queues = self.sqs.iter().flatten();
        self.unreachable_since = queues.filter_map(|queue| queue.unreachable_since).min();
    }

    /// Whether the rings of `queue` and of its completion queue can be reached.
    #[inline]
    pub fn is_reachable(&self, queue: &SubmissionQueue) -> bool {
        queue.reachable() && self.cq(queue.cqid).is_some_and(CompletionQueue::reachable)
    }

    /// Since when the queue that could not be reached for longest cannot be.
    #[inline]
    pub fn unreachable_since(&self) -> Option<u64> {
        self.unreachable_since
    }

    /// Whether any I/O queue exists.
    pub fn has_io_queues(&self) -> bool {
        self.sqs[1..].iter().any(Option::is_some) || self.cqs[1..].iter().any(Option::is_some)
    }

    /// Whether polling sees work that nothing else announces.
    #[inline]
    pub fn is_polled(&self) -> bool {
        self.active.len() > 1 && self.shadow.as_ref().is_some_and(|pages| pages.values.is_some())
    }

    /// Looks up the memory of queues and shadow pages again.
    pub fn resolve(&mut self, dma: &DmaSpace) {
        self.generation = dma.generation();
        for queue in self.sqs.iter_mut().flatten() {
            queue.resolve(dma);
            queue.doorbell.forget_event_index();
        }
        for queue in self.cqs.iter_mut().flatten() {
            queue.resolve(dma);
            queue.doorbell.forget_event_index();
        }
        if let Some(pages) = &mut self.shadow {
            pages.resolve(dma);
        }
        for slot in 0..QUEUES {
            if self.sqs[slot].as_ref().is_some_and(|queue| self.is_reachable(queue))
                && let Some(queue) = &mut self.sqs[slot]
            {
                queue.unreachable_since = None;
            }
        }
        self.find_unreachable();
    }

    /// Forgets the memory of queues and shadow pages until they are looked up again.
    pub fn unresolve(&mut self) {
        self.resolve(&DmaSpace::new());
        self.generation = u64::MAX;
    }
}
