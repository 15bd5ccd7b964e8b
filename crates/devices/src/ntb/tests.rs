//! The registers as Linux' `ntb_hw_intel` uses them, and as nobody should.

use proptest::prelude::*;

use super::map;
use super::registers::{BridgeEffects, BridgeRegisters, BridgeSide, BridgeWindows, Miss};

const WINDOWS: BridgeWindows =
    BridgeWindows { sizes: [64 << 20, 1 << 20], second_is_memory: false };
const MEMORY: BridgeWindows =
    BridgeWindows { sizes: [64 << 20, 512 << 20], second_is_memory: true };

fn bridge(windows: BridgeWindows) -> BridgeRegisters {
    let mut registers = BridgeRegisters::new([windows, windows]);
    for side in BridgeSide::BOTH {
        registers.connect(side, true);
        // Memory space and bus mastering.
        registers.config_write(side, 4, &[6, 0]);
    }
    registers
}

fn linked(windows: BridgeWindows) -> BridgeRegisters {
    let mut registers = bridge(windows);
    for side in BridgeSide::BOTH {
        registers.write(side, map::CONTROL, &0_u32.to_le_bytes());
    }
    registers.train();
    for side in BridgeSide::BOTH {
        // The link's doorbell.
        registers.write(side, map::STATUS, &u64::MAX.to_le_bytes());
    }
    registers
}

fn read64(registers: &BridgeRegisters, side: BridgeSide, offset: u64) -> u64 {
    let mut data = [0; 8];
    registers.read(side, offset, &mut data);
    u64::from_le_bytes(data)
}

fn write64(
    registers: &mut BridgeRegisters,
    side: BridgeSide,
    offset: u64,
    value: u64,
) -> BridgeEffects {
    registers.write(side, offset, &value.to_le_bytes())
}

fn link_status(registers: &BridgeRegisters, side: BridgeSide) -> u16 {
    let mut data = [0; 2];
    registers.config_read(side, map::LINK_STATUS.into(), &mut data);
    u16::from_le_bytes(data)
}

#[test]
fn a_host_finds_the_function_that_linux_drives() {
    let registers = BridgeRegisters::new([MEMORY, MEMORY]);
    for (side, ppd) in [(BridgeSide::A, 0x01), (BridgeSide::B, 0x11)] {
        let mut config = [0; 256];
        registers.config_read(side, 0, &mut config);
        assert_eq!(&config[..4], [0x86, 0x80, 0x1c, 0x20]);
        assert_eq!(config[0x0b], 6, "a bridge");
        assert_eq!((config[0x10] & 15, config[0x18] & 15, config[0x20] & 15), (4, 12, 12));
        assert_eq!(config[usize::from(map::PPD)], ppd);
        assert_eq!(&config[0xd0..0xd4], [26, 29, 26, 29], "sizes of the windows");
        let msix = usize::from(config[0x34]);
        let at = std::iter::successors(Some(msix), |at| Some(config[at + 1].into()));
        let at = { at }.take(8).find(|at| config[*at] == 0x11).expect("MSI-X");
        assert_eq!(config[at + 2], 32, "33 vectors");
        assert_eq!(&config[at + 4..at + 12], [0, 0xc0, 0, 0, 0, 0xe0, 0, 0]);
    }
}

#[test]
fn the_link_is_up_while_both_ends_enable_it_and_both_are_told() {
    let mut registers = bridge(WINDOWS);
    assert!(
        registers.write(BridgeSide::A, map::CONTROL, &0_u32.to_le_bytes()).interrupts.is_empty()
    );
    assert_eq!(link_status(&registers, BridgeSide::A) & map::LINK_ACTIVE, 0);
    assert_eq!(registers.train(), BridgeEffects::default());
    let enabled = registers.write(BridgeSide::B, map::CONTROL, &0_u32.to_le_bytes());
    assert_eq!(enabled, BridgeEffects { training: true, ..BridgeEffects::default() });
    let up = registers.train();
    assert_eq!(
        up.interrupts,
        [(BridgeSide::A, 0), (BridgeSide::B, 0)],
        "the link's vector after reset"
    );
    for side in BridgeSide::BOTH {
        assert_ne!(link_status(&registers, side) & map::LINK_ACTIVE, 0);
        assert_eq!(read64(&registers, side, map::STATUS), 1 << map::LINK_DOORBELL);
        write64(&mut registers, side, map::STATUS, 1 << map::LINK_DOORBELL);
    }
    let gone = registers.connect(BridgeSide::B, false);
    assert_eq!(gone.interrupts, [(BridgeSide::A, 0)]);
    assert_eq!(link_status(&registers, BridgeSide::A) & map::LINK_ACTIVE, 0);
}

#[test]
fn a_masked_doorbell_raises_its_interrupt_when_it_is_unmasked() {
    let mut registers = linked(WINDOWS);
    write64(&mut registers, BridgeSide::B, map::DISABLED, 1 << 5);
    let rung = registers.write(BridgeSide::A, map::PEER_DOORBELLS + 5 * 4, &1_u32.to_le_bytes());
    assert_eq!((rung.doorbells, rung.interrupts), (1, vec![]));
    assert_eq!(read64(&registers, BridgeSide::B, map::STATUS), 1 << 5);
    assert_eq!(read64(&registers, BridgeSide::A, map::PEER_STATUS), 1 << 5);
    assert_eq!(
        write64(&mut registers, BridgeSide::B, map::DISABLED, 0).interrupts,
        [(BridgeSide::B, 6)]
    );
    let again = registers.write(BridgeSide::A, map::PEER_DOORBELLS + 5 * 4, &1_u32.to_le_bytes());
    assert_eq!(again.interrupts, [], "it is ringing already");
    write64(&mut registers, BridgeSide::B, map::STATUS, 1 << 5);
    registers.write(BridgeSide::B, map::VECTORS + 5, &[5]);
    let again = registers.write(BridgeSide::A, map::PEER_DOORBELLS + 5 * 4, &1_u32.to_le_bytes());
    assert_eq!(again.interrupts, [(BridgeSide::B, 5)]);
}

#[test]
fn scratchpads_are_read_and_written_from_both_ends() {
    let mut registers = linked(WINDOWS);
    registers.write(BridgeSide::A, map::SCRATCHPADS + 4, &0x1111_2222_u32.to_le_bytes());
    registers.write(BridgeSide::A, map::PEER_SCRATCHPADS, &0x3333_4444_u32.to_le_bytes());
    assert_eq!(read64(&registers, BridgeSide::B, map::PEER_SCRATCHPADS), 0x1111_2222_0000_0000);
    assert_eq!(read64(&registers, BridgeSide::B, map::SCRATCHPADS), 0x3333_4444);
    registers.reset(BridgeSide::A);
    assert_eq!(read64(&registers, BridgeSide::B, map::PEER_SCRATCHPADS), 0);
}

#[test]
fn a_window_leads_where_the_peer_translates_it_and_no_further_than_it_opened_it() {
    let mut registers = linked(WINDOWS);
    // Not a multiple of the window's size: the low bits are ignored.
    write64(&mut registers, BridgeSide::B, map::INBOUND, 0xfc00_1000);
    assert_eq!(read64(&registers, BridgeSide::B, map::INBOUND), 0xfc00_0000);
    assert_eq!(registers.translate(BridgeSide::A, 0, 0x2e0_0000, 4), Ok(0xfee0_0000));
    assert_eq!(registers.translate(BridgeSide::A, 0, (64 << 20) - 2, 4), Err(Miss::Beyond));
    assert_eq!(registers.translate(BridgeSide::A, 0, u64::MAX, 2), Err(Miss::Beyond));
    // A limit counts from where B has its own BAR.
    registers.config_write(BridgeSide::B, 0x18, &0x38_0000_0000_u64.to_le_bytes());
    write64(&mut registers, BridgeSide::B, map::INBOUND + 8, 0x38_0000_1000);
    assert!(registers.translate(BridgeSide::A, 0, 0xffc, 4).is_ok());
    assert_eq!(registers.translate(BridgeSide::A, 0, 0xffd, 4), Err(Miss::Beyond));
    // After a reset its hypervisor still has the BAR there, and tells nobody.
    registers.reset(BridgeSide::B);
    registers.config_write(BridgeSide::B, 4, &[6, 0]);
    registers.write(BridgeSide::B, map::CONTROL, &0_u32.to_le_bytes());
    registers.train();
    write64(&mut registers, BridgeSide::B, map::INBOUND + 8, 0x38_0000_1000);
    assert_eq!(registers.translate(BridgeSide::A, 0, 0xffc, 4), Ok(0xffc));
    // Linux' first value means a window of no length.
    write64(&mut registers, BridgeSide::B, map::INBOUND + 8, 0x2000_0000_0000_0000);
    assert_eq!(registers.translate(BridgeSide::A, 0, 0, 4), Err(Miss::Beyond));
    assert_eq!(read64(&registers, BridgeSide::B, map::MISSES) & 0xffff, 1, "since the reset");
    write64(&mut registers, BridgeSide::B, map::INBOUND + 8, 0);
    registers.config_write(BridgeSide::B, 4, &[2, 0]);
    assert_eq!(registers.translate(BridgeSide::A, 0, 0, 4), Err(Miss::NotMaster));
    registers.write(BridgeSide::A, map::CONTROL, &map::CONTROL_DISABLE.to_le_bytes());
    assert_eq!(registers.translate(BridgeSide::A, 0, 0, 4), Err(Miss::LinkDown));
}

#[test]
fn the_peers_memory_is_not_translated() {
    let mut registers = linked(MEMORY);
    write64(&mut registers, BridgeSide::B, map::INBOUND + 0x10, 0x4000_0000);
    assert_eq!(read64(&registers, BridgeSide::B, map::INBOUND + 0x10), 0);
    assert_eq!(registers.translate(BridgeSide::A, 1, 0, 4), Err(Miss::Memory));
}

/// What hostile software may do to one end.
#[derive(Debug, Clone)]
enum Step {
    Write(bool, u64, Vec<u8>),
    Read(bool, u64, usize),
    Config(bool, u64, Vec<u8>),
    Reset(bool),
    Connect(bool, bool),
    Train,
    Translate(bool, bool, u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let places = prop_oneof![
        0..0x200_u64,
        0x4000..0x4600_u64,
        0xbff0..0xc220_u64,
        0xdff0..0x1_0000_u64,
        any::<u64>()
    ];
    let bytes = || prop::collection::vec(any::<u8>(), 0..20);
    let step = prop_oneof![
        4 => (any::<bool>(), places.clone(), bytes()).prop_map(|(s, o, d)| Step::Write(s, o, d)),
        2 => (any::<bool>(), places, 0..40_usize).prop_map(|(s, o, n)| Step::Read(s, o, n)),
        2 => (any::<bool>(), 0..4096_u64, bytes()).prop_map(|(s, o, d)| Step::Config(s, o, d)),
        1 => any::<bool>().prop_map(Step::Reset),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(s, c)| Step::Connect(s, c)),
        1 => Just(Step::Train),
        2 => (any::<bool>(), any::<bool>(), any::<u64>(), any::<u64>())
            .prop_map(|(s, w, o, l)| Step::Translate(s, w, o, l)),
    ];
    prop::collection::vec(step, 0..60)
}

fn side(b: bool) -> BridgeSide {
    if b { BridgeSide::B } else { BridgeSide::A }
}

proptest! {
    #[test]
    fn whatever_software_does_the_registers_stay_in_order(steps in steps(), memory: bool) {
        let windows = if memory { MEMORY } else { WINDOWS };
        let mut registers = BridgeRegisters::new([windows, windows]);
        for step in steps {
            let effects = match step {
                Step::Write(s, offset, data) => registers.write(side(s), offset, &data),
                Step::Config(s, offset, data) => registers.config_write(side(s), offset, &data),
                Step::Reset(s) => registers.reset(side(s)),
                Step::Connect(s, connected) => registers.connect(side(s), connected),
                Step::Train => registers.train(),
                Step::Read(s, offset, count) => {
                    let mut data = vec![0xa5; count];
                    registers.read(side(s), offset, &mut data);
                    continue;
                }
                Step::Translate(s, w, offset, length) => {
                    let size = windows.sizes[usize::from(w)];
                    if let Ok(address) = registers.translate(side(s), w.into(), offset, length) {
                        prop_assert!(registers.link_is_up());
                        prop_assert!(registers.masters_bus(side(s).peer()));
                        prop_assert!(offset.checked_add(length).is_some_and(|end| end <= size));
                        prop_assert!(address.checked_add(length).is_some());
                        prop_assert_eq!((address - offset) % size, 0, "the base is aligned");
                    }
                    continue;
                }
            };
            for (side, vector) in effects.interrupts {
                prop_assert!(vector < map::MSIX_VECTORS);
                let status = read64(&registers, side, map::STATUS);
                let masked = read64(&registers, side, map::DISABLED);
                prop_assert_ne!(status & !masked, 0, "an interrupt without a cause");
            }
            for side in BridgeSide::BOTH {
                prop_assert_eq!(read64(&registers, side, map::STATUS) & !map::ALL_DOORBELLS, 0);
                let active = link_status(&registers, side) & map::LINK_ACTIVE != 0;
                prop_assert_eq!(active, registers.link_is_up());
                if !registers.link_is_up() {
                    prop_assert!(registers.clone().translate(side, 0, 0, 4).is_err());
                }
            }
        }
    }
}
