//! The registers of both ends of a bridge, and what they do: no I/O, no clock, no threads.
//!
//! An end's software writes registers; what comes of it, interrupts at either end, is returned as [`BridgeEffects`]. An
//! access to a window is translated to the peer's bus address, or it misses. What software writes is hostile: any
//! access of any length at any offset is answered.

use rackbus_pci::Mode;
use rackbus_pci::config::{ConfigSpace, Effects as ConfigEffects};
use rackbus_pci::programmed::{LOOKED_AT, programmed};

use super::config::config_space;
use super::map;
use super::register::{KEPT, Register, TABLE_WORDS};

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BridgeSide {
    /// Port 0, which Linux calls the upstream device.
    A,
    /// Port 1, the downstream device.
    B,
}

impl BridgeSide {
    /// Both ends, in the order of their numbers.
    pub const BOTH: [BridgeSide; 2] = [BridgeSide::A, BridgeSide::B];

    /// The end of the other machine.
    #[must_use]
    pub fn peer(self) -> BridgeSide {
        match self {
            BridgeSide::A => BridgeSide::B,
            BridgeSide::B => BridgeSide::A,
        }
    }

    /// The end's number in arrays of both: 0 or 1.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            BridgeSide::A => 0,
            BridgeSide::B => 1,
        }
    }
}

/// The windows that one end has onto its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BridgeWindows {
    /// Size of each in bytes: a power of two.
    pub sizes: [u64; 2],
    /// The second window is the peer's memory itself, mapped: nothing translates it.
    pub second_is_memory: bool,
}

/// Why an access to a window reaches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Miss {
    /// Not both ends have enabled the link.
    #[error("the link is down")]
    LinkDown,
    /// The peer's function may not master its bus.
    #[error("bus mastering is off at the peer")]
    NotMaster,
    /// The access is not inside what the peer opened.
    #[error("it is beyond the window that the peer opened")]
    Beyond,
    /// The window has no translation.
    #[error("the window is memory, which is not translated")]
    Memory,
}

/// What a write means beyond the registers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BridgeEffects {
    /// Interrupts to raise, by MSI-X vector.
    pub interrupts: Vec<(BridgeSide, u16)>,
    /// Doorbells of the peer's that were rung.
    pub doorbells: u32,
    /// The writing side's interrupts go so from now on.
    pub mode: Option<Mode>,
    /// The writing side was reset.
    pub reset: bool,
    /// Both ends want the link from now on: it is up when it was [trained](BridgeRegisters::train).
    pub training: bool,
}

/// What one end's registers hold.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Half {
    connected: bool,
    control: u32,
    base: [u64; 2],
    limit: [u64; 2],
    status: u64,
    disabled: u64,
    misses: u16,
    scratchpads: [u32; map::SCRATCHPAD_COUNT],
    vectors: [u8; map::MSIX_VECTORS as usize],
    kept: [u64; KEPT.len()],
    table: [u32; TABLE_WORDS],
}

impl Half {
    /// As after a reset: the link switched off, the vector of the link's doorbell the first one.
    fn new(connected: bool) -> Half {
        let mut vectors = [0; map::MSIX_VECTORS as usize];
        let doorbells = vectors.iter_mut().take(map::DOORBELLS as usize);
        (1..).zip(doorbells).for_each(|(vector, of)| *of = vector);
        Half {
            connected,
            control: map::CONTROL_LOCK | map::CONTROL_DISABLE,
            base: [0; 2],
            limit: [0; 2],
            status: 0,
            disabled: 0,
            misses: 0,
            scratchpads: [0; map::SCRATCHPAD_COUNT],
            vectors,
            kept: [0; KEPT.len()],
            table: [0; TABLE_WORDS],
        }
    }

    fn enables_link(&self) -> bool {
        self.connected && self.control & map::CONTROL_DISABLE == 0
    }

    /// Doorbells that were rung and raise interrupts.
    fn raising(&self) -> u64 {
        self.status & !self.disabled
    }
}

/// The registers and configuration spaces of both ends.
#[derive(Debug, Clone)]
pub struct BridgeRegisters {
    halves: [Half; 2],
    configs: [ConfigSpace; 2],
    windows: [BridgeWindows; 2],
    /// Where each end has its windows' BARs: as it last programmed them, also over a reset, after which QEMU does not
    /// tell them again.
    placed: [[u64; 2]; 2],
    link: bool,
}

impl BridgeRegisters {
    /// A bridge whose ends have these windows; nobody is connected.
    #[must_use]
    pub fn new(windows: [BridgeWindows; 2]) -> BridgeRegisters {
        let config = |side: BridgeSide| config_space(side, windows);
        BridgeRegisters {
            halves: [Half::new(false), Half::new(false)],
            configs: BridgeSide::BOTH.map(config),
            windows,
            placed: [[0; 2]; 2],
            link: false,
        }
    }

    /// Whether the link is up: both ends are there and have enabled it.
    #[must_use]
    pub fn link_is_up(&self) -> bool {
        self.link
    }

    /// A machine has `side`, or has it no more. Either way it is as after a reset.
    pub fn connect(&mut self, side: BridgeSide, connected: bool) -> BridgeEffects {
        self.halves[side.index()] = Half::new(connected);
        self.configs[side.index()].reset();
        let mut effects = BridgeEffects { reset: true, ..BridgeEffects::default() };
        self.follow_control(&mut effects);
        effects
    }

    /// The time that a link takes to train has passed: it is up if both ends still want it. Linux' drivers rely on
    /// that time: `ntb_transport` cancels what it does for a link that comes up while it is being enabled.
    pub fn train(&mut self) -> BridgeEffects {
        let mut effects = BridgeEffects::default();
        if self.halves.iter().all(Half::enables_link) {
            self.set_link(true, &mut effects);
        }
        effects
    }

    /// Resets `side`, as its machine asks.
    pub fn reset(&mut self, side: BridgeSide) -> BridgeEffects {
        self.connect(side, self.halves[side.index()].connected)
    }

    /// What software of `side` reads in configuration space.
    pub fn config_read(&self, side: BridgeSide, offset: u64, data: &mut [u8]) {
        self.configs[side.index()].read(offset, data, false);
    }

    /// Software of `side` writes configuration space.
    pub fn config_write(&mut self, side: BridgeSide, offset: u64, data: &[u8]) -> BridgeEffects {
        let config = &mut self.configs[side.index()];
        let ConfigEffects { interrupts, reset, .. } = config.write(offset, data);
        if reset {
            return self.reset(side);
        }
        let mode = interrupts.then(|| config.mode());
        let mut bytes = [0; LOOKED_AT];
        config.read(0, &mut bytes, false);
        let bars = programmed(&bytes).bars;
        for (window, placed) in self.placed[side.index()].iter_mut().enumerate() {
            *placed = bars.get(&map::BAR_WINDOWS[window]).copied().unwrap_or(*placed);
        }
        BridgeEffects { mode, ..BridgeEffects::default() }
    }

    /// Whether `side` may master its bus.
    #[must_use]
    pub fn masters_bus(&self, side: BridgeSide) -> bool {
        self.configs[side.index()].masters_bus()
    }

    /// Whether `side` answers accesses to its BARs.
    #[must_use]
    pub fn answers_memory(&self, side: BridgeSide) -> bool {
        self.configs[side.index()].answers_memory()
    }

    /// What software of `side` reads at `offset` of BAR 0.
    pub fn read(&self, side: BridgeSide, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let mut at = 0;
        while at < data.len() {
            let Some((offset, (register, begin, width))) = offset
                .checked_add(at as u64)
                .and_then(|offset| Some((offset, Register::at(offset)?)))
            else {
                at += 1;
                continue;
            };
            let inside = usize::try_from(offset - begin).unwrap_or(0);
            let count = (usize::try_from(width).unwrap_or(1) - inside).min(data.len() - at);
            let value = self.load(side, register).to_le_bytes();
            data[at..at + count].copy_from_slice(&value[inside..inside + count]);
            at += count;
        }
    }

    fn load(&self, side: BridgeSide, register: Register) -> u64 {
        let own = &self.halves[side.index()];
        let peer = &self.halves[side.peer().index()];
        match register {
            Register::Control => own.control.into(),
            Register::Base(window) => own.base[window],
            Register::Limit(window) => own.limit[window],
            Register::Status => own.status,
            Register::Disabled => own.disabled,
            Register::Misses => own.misses.into(),
            Register::Scratchpad(index) => own.scratchpads[index].into(),
            Register::Vector(index) => own.vectors[index].into(),
            Register::Doorbell(_) => 0,
            Register::PeerScratchpad(index) => peer.scratchpads[index].into(),
            Register::PeerStatus => peer.status,
            Register::PeerDisabled => peer.disabled,
            Register::Kept(index) => own.kept[index],
            Register::Table(index) => own.table[index].into(),
        }
    }

    /// Software of `side` writes at `offset` of BAR 0.
    pub fn write(&mut self, side: BridgeSide, offset: u64, data: &[u8]) -> BridgeEffects {
        let mut effects = BridgeEffects::default();
        let mut at = 0;
        while at < data.len() {
            let Some((offset, (register, begin, width))) = offset
                .checked_add(at as u64)
                .and_then(|offset| Some((offset, Register::at(offset)?)))
            else {
                at += 1;
                continue;
            };
            let inside = usize::try_from(offset - begin).unwrap_or(0);
            let count = (usize::try_from(width).unwrap_or(1) - inside).min(data.len() - at);
            let (mut bits, mut mask) = ([0; 8], [0; 8]);
            bits[inside..inside + count].copy_from_slice(&data[at..at + count]);
            mask[inside..inside + count].fill(0xff);
            let written = (u64::from_le_bytes(bits), u64::from_le_bytes(mask));
            self.store(side, register, written, &mut effects);
            at += count;
        }
        effects
    }

    /// Writes those bits of a register that are in the mask.
    fn store(
        &mut self,
        side: BridgeSide,
        register: Register,
        (bits, mask): (u64, u64),
        effects: &mut BridgeEffects,
    ) {
        let windows = self.windows[side.peer().index()];
        let before = self.halves.each_ref().map(Half::raising);
        let own = &mut self.halves[side.index()];
        let merged = |old: u64| old & !mask | bits;
        #[allow(clippy::cast_possible_truncation)] // to the width of the register
        match register {
            Register::Control => own.control = merged(own.control.into()) as u32,
            // It is the peer's memory as it lies there.
            Register::Base(1) if windows.second_is_memory => {}
            Register::Base(index) => {
                own.base[index] = merged(own.base[index]) & !(windows.sizes[index] - 1)
            }
            Register::Limit(index) => own.limit[index] = merged(own.limit[index]),
            Register::Status => own.status &= !bits,
            Register::Disabled => own.disabled = merged(own.disabled) & map::ALL_DOORBELLS,
            Register::Scratchpad(index) => {
                own.scratchpads[index] = merged(own.scratchpads[index].into()) as u32;
            }
            Register::Vector(index) => own.vectors[index] = merged(own.vectors[index].into()) as u8,
            Register::Doorbell(bit) => {
                if bits & 1 != 0 {
                    self.halves[side.peer().index()].status |= 1 << bit;
                    effects.doorbells += 1;
                }
            }
            Register::PeerScratchpad(index) => {
                let pad = &mut self.halves[side.peer().index()].scratchpads[index];
                *pad = merged((*pad).into()) as u32;
            }
            Register::Kept(index) => own.kept[index] = merged(own.kept[index]),
            Register::Table(index) => own.table[index] = merged(own.table[index].into()) as u32,
            Register::Misses | Register::PeerStatus | Register::PeerDisabled => {}
        }
        self.raise(before, effects);
        if register == Register::Control {
            self.follow_control(effects);
        }
    }

    /// Raises what did not raise an interrupt `before`, and does now.
    fn raise(&self, before: [u64; 2], effects: &mut BridgeEffects) {
        for side in BridgeSide::BOTH {
            let half = &self.halves[side.index()];
            let new = half.raising() & !before[side.index()];
            for (doorbell, vector) in half.vectors.iter().enumerate() {
                if new >> doorbell & 1 != 0 && u16::from(*vector) < map::MSIX_VECTORS {
                    effects.interrupts.push((side, (*vector).into()));
                }
            }
        }
    }

    /// Takes the link down where an end does not want it, and has it trained where both do.
    fn follow_control(&mut self, effects: &mut BridgeEffects) {
        match self.halves.iter().all(Half::enables_link) {
            true => effects.training |= !self.link,
            false => self.set_link(false, effects),
        }
    }

    /// The link is up or down, which both ends are told.
    fn set_link(&mut self, up: bool, effects: &mut BridgeEffects) {
        let status = map::LINK_SHAPE | if up { map::LINK_ACTIVE } else { 0 };
        for config in &mut self.configs {
            config.set(map::LINK_STATUS, &status.to_le_bytes());
        }
        if std::mem::replace(&mut self.link, up) == up {
            return;
        }
        let before = self.halves.each_ref().map(Half::raising);
        for half in self.halves.iter_mut().filter(|half| half.connected) {
            half.status |= 1 << map::LINK_DOORBELL;
        }
        self.raise(before, effects);
    }

    /// The peer's bus address of `length` bytes at `offset` of a window of `side`.
    ///
    /// # Errors
    /// [`Miss`], which the peer counts.
    pub fn translate(
        &mut self,
        side: BridgeSide,
        window: usize,
        offset: u64,
        length: u64,
    ) -> Result<u64, Miss> {
        let target = self.target(side, window, offset, length);
        if target.is_err() {
            let misses = &mut self.halves[side.peer().index()].misses;
            *misses = misses.wrapping_add(1);
        }
        target
    }

    fn target(
        &self,
        side: BridgeSide,
        window: usize,
        offset: u64,
        length: u64,
    ) -> Result<u64, Miss> {
        if window == 1 && self.windows[side.index()].second_is_memory {
            return Err(Miss::Memory);
        }
        if !self.link {
            return Err(Miss::LinkDown);
        }
        if !self.masters_bus(side.peer()) {
            return Err(Miss::NotMaster);
        }
        let end = offset.checked_add(length).ok_or(Miss::Beyond)?;
        if end > self.open(side.peer(), window) {
            return Err(Miss::Beyond);
        }
        let base = self.halves[side.peer().index()].base[window];
        // The whole access has addresses.
        base.checked_add(end).map(|_| base + offset).ok_or(Miss::Beyond)
    }

    /// How much of a window `side` has opened to its peer. The limit is an address, counted from where `side` has
    /// its own BAR of that window, as Linux programs it; 0 is no limit.
    fn open(&self, side: BridgeSide, window: usize) -> u64 {
        let size = self.windows[side.peer().index()].sizes[window];
        let limit = self.halves[side.index()].limit[window];
        if limit == 0 {
            return size;
        }
        let bar = self.placed[side.index()][window];
        limit.checked_sub(bar).filter(|open| *open <= size).unwrap_or(0)
    }
}
