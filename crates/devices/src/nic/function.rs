//! A virtual function of a network card: a virtio network device (virtio 1.2, section 5.1) at a port of its lender's
//! network.
//!
//! While its engine polls, the function looks at the queues itself and asks their drivers for no notifications; before
//! the engine sleeps it asks for them and looks once more. The port does the same on its side.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::{Carried, CarriedSession, Handles, InheritedEnd};
use rackbus_net::{MacAddress, NetworkPort};
use rackbus_pci::operations::Tally;
use rackbus_pci::{
    Bus, Function, FunctionInfo, MediumOffer, MediumRefused, ModelState, Operations, ResetKind,
    RestoreError, SaveError, Work,
};
use rackbus_spec::virtio::feature::RING_PACKED;
use rackbus_spec::virtio::net::{CLASS_CODE, DEVICE_TYPE, config, feature};

use super::control::NicSettings;
use super::counters::{NicCounters, count};
use super::medium::{NicDescription, RemotePort, ServedPort};
use super::port::NicPort;
use super::receive::{Cutting, Delivery};
use super::shaper::Shaper;
use super::{CLASS, MOST_PAIRS, features};
use crate::virtio::{BufferChain, DriverFault, QueueError, RegisterWrite, Transport, layout};

/// For how long a queue's memory may be out of reach until the driver is told that it is broken: a hypervisor maps
/// memory anew while its guest runs.
const UNREACHABLE_NS: u64 = 100_000_000;

/// What a function is made with.
#[derive(Debug, Clone)]
pub struct NicOptions {
    /// The function's name in the rack: `alpha/nic0.vf1`.
    pub name: String,
    /// Pairs of queues, 1 to [`MOST_PAIRS`].
    pub pairs: u16,
    /// Its address, where its port does not say another.
    pub mac: MacAddress,
    /// Bytes per second in each direction, and in one burst.
    pub rate: Option<(u64, u64)>,
    /// Whether drivers are offered packed rings, beside split ones.
    pub packed_rings: bool,
}

/// The kinds of operations that are counted.
pub(super) const RECEIVE: usize = 0;
pub(super) const TRANSMIT: usize = 1;
const NAMES: [&str; 2] = ["receive", "transmit"];

/// What a poll of one direction came to.
#[derive(Debug, Default)]
pub(super) struct PollOutcome {
    /// A request was completed, so the driver may want an interrupt.
    pub done: bool,
    /// It waits for something that does not show in its queues: room, buffers, its rate.
    pub stalled: bool,
    /// When it is to be looked at again.
    pub until: Option<u64>,
    /// When it gives up what its driver may let it do at any moment before.
    pub patient_until: Option<u64>,
}

impl PollOutcome {
    pub fn wait_until(&mut self, at: u64) {
        self.stalled = true;
        self.until = Some(self.until.map_or(at, |until| until.min(at)));
    }
}

/// A virtio network function, with its queues and the port that it sends by.
pub struct Nic {
    info: FunctionInfo,
    pub(super) operations: Operations,
    pub(super) counters: Arc<NicCounters>,
    pub(super) port: NicPort,
    /// What serves the port to a front elsewhere; the function itself does nothing then.
    pub(super) served: Option<ServedPort>,
    /// What came with a saved state that is to be restored.
    pub(super) inherited: InheritedEnd,
    pub(super) mac: MacAddress,
    pub(super) most_pairs: u16,
    rate: Option<u64>,
    packed_rings: bool,
    pub(super) transport: Transport,
    pub(super) settings: NicSettings,
    pub(super) link_up: bool,
    pub(super) inward: Shaper,
    pub(super) outward: Shaper,
    pub(super) chain: BufferChain,
    pub(super) delivery: Delivery,
    /// A frame that is handed over in pieces.
    pub(super) cutting: Option<Cutting>,
    /// Since when each pair has had no buffers for its frames.
    pub(super) without_buffers: [Option<u64>; MOST_PAIRS as usize],
    /// The pair that transmits first in the next poll.
    pub(super) first_pair: u16,
    /// Queues and port were asked to ring.
    parked: bool,
    /// Directions that wait for something that does not show in their queues.
    stalled: [bool; 2],
}

impl std::fmt::Debug for Nic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nic").field("transport", &self.transport).finish_non_exhaustive()
    }
}

impl Nic {
    /// A function at this port, or with its link down.
    pub fn new(
        options: &NicOptions,
        port: Option<Box<dyn NetworkPort>>,
        counters: Arc<NicCounters>,
    ) -> Nic {
        let serial = crate::place::digest(&options.name);
        let mac = port.as_ref().map_or(options.mac, |port| port.mac());
        let shown = options.rate.map(|(rate, _)| rate);
        let port = port.map_or(NicPort::Absent, NicPort::Own);
        let nic = Nic::with_port(serial, (options.pairs, shown), mac, port, counters);
        let (inward, outward) = (Shaper::new(options.rate), Shaper::new(options.rate));
        Nic { inward, outward, ..nic }.with_packed_rings(options.packed_rings)
    }

    /// The front of a function whose port another node has, which keeps to its rate.
    pub(super) fn front(
        description: &NicDescription,
        port: RemotePort,
        counters: Arc<NicCounters>,
    ) -> Nic {
        let NicDescription { serial, mac, pairs, rate, split_rings, .. } = *description;
        let port = NicPort::Remote(Box::new(port));
        Nic::with_port(serial, (pairs, rate), MacAddress(mac), port, counters)
            .with_packed_rings(!split_rings)
    }

    fn with_port(
        serial: u64,
        (pairs, rate): (u16, Option<u64>),
        mac: MacAddress,
        port: NicPort,
        counters: Arc<NicCounters>,
    ) -> Nic {
        let pairs = pairs.clamp(1, MOST_PAIRS);
        let queues = 2 * pairs + 1;
        let many = if pairs > 1 { feature::MQ } else { 0 };
        Nic {
            info: layout::info(DEVICE_TYPE, CLASS_CODE, queues, config::SIZE, serial),
            operations: Operations::new(&NAMES),
            counters,
            link_up: port.get().is_some_and(|port| port.is_up()),
            port,
            served: None,
            inherited: InheritedEnd::default(),
            mac,
            most_pairs: pairs,
            rate,
            transport: Transport::new(
                features::OFFERED | features::FORMER | many,
                features::allows,
                queues,
            )
            .withholding(features::FORMER),
            packed_rings: true,
            settings: NicSettings::new(0, mac),
            inward: Shaper::new(None),
            outward: Shaper::new(None),
            chain: BufferChain::default(),
            delivery: Delivery::default(),
            cutting: None,
            without_buffers: [None; MOST_PAIRS as usize],
            first_pair: 0,
            parked: false,
            stalled: [false; 2],
        }
    }

    /// The same, offering drivers packed rings or not.
    fn with_packed_rings(self, offered: bool) -> Nic {
        let packed = if offered { 0 } else { RING_PACKED };
        let transport = self.transport.withholding(features::FORMER | packed);
        Nic { transport, packed_rings: offered, ..self }
    }

    /// Pairs that may transmit: the command that sets how many are used is about what its driver receives.
    pub(super) fn sending_pairs(&self) -> u16 {
        if self.transport.has(feature::MQ) { self.most_pairs } else { 1 }
    }

    /// The device's configuration as it reads.
    fn config(&self) -> [u8; config::SIZE as usize] {
        let mut image = [0; config::SIZE as usize];
        let mut put = |at: u64, bytes: &[u8]| {
            image[at as usize..][..bytes.len()].copy_from_slice(bytes);
        };
        let mut status = if self.link_up { config::LINK_UP } else { 0 };
        if self.settings.announce {
            status |= config::ANNOUNCE;
        }
        let megabits = |rate: u64| u32::try_from(rate / 125_000).unwrap_or(u32::MAX - 1).max(1);
        put(config::MAC, &self.settings.mac);
        put(config::STATUS, &status.to_le_bytes());
        put(config::MAX_PAIRS, &self.most_pairs.to_le_bytes());
        let mtu = self.port.get().map_or(1500, |port| port.mtu());
        put(config::MTU, &mtu.to_le_bytes());
        let speed = self.rate.map_or(config::SPEED_UNKNOWN, megabits);
        put(config::SPEED, &speed.to_le_bytes());
        put(config::DUPLEX, &[config::DUPLEX_FULL]);
        image
    }

    /// The port's link may have changed.
    fn look_at_link(&mut self, bus: &Bus<'_>) {
        let up = self.port.get().is_some_and(|port| port.is_up());
        if up != self.link_up {
            self.link_up = up;
            self.transport.config_changed(bus.irq);
        }
    }

    /// The engine polls: the port need not ring. True when it slept before.
    fn wake_up(&mut self) -> bool {
        let slept = std::mem::take(&mut self.parked);
        if let (true, Some(port)) = (slept, self.port.get_mut()) {
            port.unpark();
        }
        slept
    }

    fn attend(&mut self, on: bool) {
        if let Some(port) = self.port.get_mut() {
            port.attend(on);
        }
    }

    /// No front elsewhere has the port any more.
    fn end_served(&mut self) {
        if let (Some(mut served), Some(port)) = (self.served.take(), self.port.get_mut()) {
            served.end(port);
        }
    }

    /// A queue cannot continue: for good, or until its memory can be reached.
    pub(super) fn stopped(
        &mut self,
        bus: &Bus<'_>,
        queue: u16,
        error: QueueError,
        outcome: &mut PollOutcome,
    ) {
        let fault = match error {
            QueueError::Fault(fault) => fault,
            QueueError::Unreachable => {
                let Some(queue) = self.transport.queue(queue) else { return };
                let since = *queue.unreachable_since.get_or_insert(bus.now_ns);
                let deadline = since.saturating_add(UNREACHABLE_NS);
                if bus.now_ns < deadline {
                    return outcome.wait_until(deadline);
                }
                DriverFault::Unreachable
            }
        };
        count(&self.counters.faults);
        self.transport.fail(bus.irq, fault);
        self.attend(false);
        self.cutting = None;
    }

    /// Counts frames that took so many ticks together.
    pub(super) fn tally(&self, kind: usize, tally: Tally, ticks: u64) {
        if tally.done > 0 {
            self.operations.add(kind, tally, ticks / u64::from(tally.done));
        }
    }

    /// The queues that hold requests which nothing but polling would find.
    fn has_work(&self) -> bool {
        let work = |queue| self.transport.has_work(queue);
        let pairs = 0..self.sending_pairs();
        let [outward, _] = self.stalled;
        let control = self.transport.has(feature::CTRL_VQ) && work(self.control_queue());
        control || (!outward && pairs.into_iter().any(|pair| work(2 * pair + 1)))
    }

    /// Goes on with what was saved.
    pub(super) fn went_on(&mut self, bus: &Bus<'_>) {
        if self.transport.runs() {
            self.attend(true);
            if self.transport.has(feature::GUEST_ANNOUNCE) {
                self.settings.announce = true;
                self.transport.config_changed(bus.irq);
            }
        }
    }
}

impl Function for Nic {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn operations(&self) -> Operations {
        self.operations.clone()
    }

    fn bar_read(&mut self, bus: &Bus<'_>, _bar: u8, offset: u64, data: &mut [u8]) {
        self.look_at_link(bus);
        let config = self.config();
        self.transport.read(bus.irq, offset, data, &config);
    }

    fn bar_write(&mut self, bus: &Bus<'_>, _bar: u8, offset: u64, data: &[u8]) {
        match self.transport.write(bus.dma, bus.irq, offset, data) {
            RegisterWrite::None => {}
            RegisterWrite::Reset => self.reset(bus, ResetKind::FunctionLevel),
            RegisterWrite::DriverOk => {
                self.settings = NicSettings::new(self.transport.accepted(), self.mac);
                self.without_buffers.fill(None);
                self.transport.poll_queues(true);
                self.attend(true);
            }
            RegisterWrite::QueueReset(queue) => {
                if queue % 2 == 0
                    && let Some(since) = self.without_buffers.get_mut(usize::from(queue / 2))
                {
                    *since = None;
                }
                if self.cutting.as_ref().is_some_and(|cutting| 2 * cutting.pair == queue) {
                    self.cutting = None;
                }
            }
        }
        // Also by a register that has what none may have.
        if self.transport.is_broken() {
            self.attend(false);
        }
    }

    fn reset(&mut self, bus: &Bus<'_>, _kind: ResetKind) {
        self.end_served();
        self.attend(false);
        self.wake_up();
        self.transport.reset(bus.irq);
        self.settings = NicSettings::new(0, self.mac);
        self.cutting = None;
        self.stalled = [false; 2];
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        let slept = self.wake_up();
        if let Some(work) = self.serve(bus) {
            return work;
        }
        self.look_at_link(bus);
        if !self.transport.runs() || !bus.dma.master() {
            return Work::Asleep(None);
        }
        self.transport.refresh(bus.dma);
        if slept {
            bus.user.before_access();
            self.transport.poll_queues(true);
        }
        let control = self.control(bus);
        let outward = self.transmit(bus);
        let inward = self.receive(bus);
        self.stalled = [outward.stalled, inward.stalled];
        let until = [&control, &outward, &inward].into_iter().filter_map(|it| it.until).min();
        if control.done || outward.done || inward.done {
            return Work::Done;
        }
        match (until, inward.patient_until) {
            (Some(until), patient) => Work::Asleep(Some(patient.map_or(until, |it| it.min(until)))),
            (None, Some(patient)) => Work::Watch(patient.saturating_sub(bus.now_ns)),
            (None, None) => Work::Idle,
        }
    }

    fn park(&mut self, bus: &Bus<'_>) -> bool {
        self.parked = true;
        if let (Some(served), Some(port)) = (&mut self.served, self.port.get_mut()) {
            return served.rest(port);
        }
        let quiet = self.port.get_mut().is_none_or(|port| port.park());
        if !self.transport.runs() {
            // The port drops what has come, and is to ring for what comes next.
            return quiet;
        }
        if !bus.dma.master() {
            return true;
        }
        self.transport.refresh(bus.dma);
        let untold = self.transport.poll_queues(false);
        // What the port has may have to wait for buffers: then a queue rings, unless they came just before that was
        // asked for.
        let [_, inward] = self.stalled;
        if inward && self.receive(bus).done {
            return false;
        }
        // Those that came may be too few for a frame, and the driver would not tell of those behind them.
        (quiet || inward) && !untold && !self.has_work()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        let served = self.served.as_ref().and_then(ServedPort::wake_fd);
        served.or_else(|| self.port.get().map(|port| port.wake_fd()))
    }

    fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        let port = match &self.port {
            NicPort::Own(port) if self.served.is_none() => port,
            NicPort::Absent => {
                let cause = std::io::Error::other("the card is in no network");
                return Err(MediumRefused::Files(cause));
            }
            NicPort::Own(_) | NicPort::Remote(_) => return Err(MediumRefused::InUse),
        };
        let description = NicDescription {
            serial: self.info.serial,
            mac: self.mac.0,
            mtu: port.mtu(),
            pairs: self.most_pairs,
            rate: self.rate,
            up: port.is_up(),
            split_rings: !self.packed_rings,
        };
        let (served, handles) = match carried {
            None => ServedPort::new(&**port).map(|(served, it)| (served, it.into()))?,
            Some(carried) => (ServedPort::carried(carried, &**port)?, Handles::new()),
        };
        self.served = Some(served);
        let description = serde_json::to_string(&description).unwrap_or_default();
        Ok(MediumOffer { class: CLASS, description, handles })
    }

    fn carried_by(&mut self, session: CarriedSession) {
        self.inherited.session = Some(session);
    }

    fn quiesce(&mut self, _bus: &Bus<'_>) {
        self.transport.release_memory();
    }

    fn save(&mut self, _bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        self.take_state()
    }

    fn take_back(&mut self) {
        self.keep_state();
    }

    fn restore(&mut self, bus: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        self.put_state(bus, state)
    }
}
