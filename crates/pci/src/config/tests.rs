//! The space as hosts and drivers use it.

use super::*;
use proptest::prelude::*;

fn info() -> FunctionInfo {
    let bar =
        |index, size| Bar { index, size, is_64bit: true, prefetchable: false, mappable: None };
    FunctionInfo {
        vendor_id: 0x1b36,
        device_id: 0x10,
        subsystem_vendor_id: 0x1af4,
        subsystem_id: 0x1100,
        revision: 2,
        class: [1, 8, 2],
        bars: vec![bar(0, 0x4000), bar(MSIX_BAR, msix_layout(33).0)],
        msix_vectors: 33,
        msi_vectors: 8,
        vendor: Vec::new(),
        serial: 0x1122_3344_5566_7788,
    }
}

fn read32(space: &ConfigSpace, offset: u16) -> u32 {
    let mut data = [0; 4];
    space.read(offset.into(), &mut data, false);
    u32::from_le_bytes(data)
}

#[test]
fn header_and_capability_chain_as_a_host_walks_them() {
    let space = ConfigSpace::new(&info());
    assert_eq!(read32(&space, 0), 0x0010_1b36);
    assert_eq!(read32(&space, 8), 0x0108_0202);
    let mut ids = Vec::new();
    let mut at = read32(&space, header::CAPABILITIES_POINTER) as u8;
    while at != 0 {
        let word = read32(&space, at.into());
        ids.push(word as u8);
        at = (word >> 8) as u8;
    }
    assert_eq!(ids, [1, 0x10, 0x11, 5]);
    assert_eq!(read32(&space, SERIAL_AT + 4), 0x5566_7788);
}

#[test]
fn capabilities_of_its_own_are_behind_the_others_as_far_as_there_is_room() {
    let own = |length| VendorCapability { body: vec![7; length], access: false };
    let access = VendorCapability { body: vec![0; 17], access: true };
    for (msi_vectors, first, count) in [(0, 0xa0, 5), (8, 0xb0, 4)] {
        let vendor = vec![own(13), own(17), own(13), access.clone(), own(13)];
        let mut space = ConfigSpace::new(&FunctionInfo { msi_vectors, vendor, ..info() });
        let mut found = Vec::new();
        let mut at = read32(&space, header::CAPABILITIES_POINTER) as u8;
        while at != 0 {
            let word = read32(&space, at.into());
            if word as u8 == capability::VENDOR {
                found.push((at, (word >> 16) as u8));
            }
            at = (word >> 8) as u8;
        }
        let expected = [(0, 16), (0x10, 20), (0x24, 16), (0x34, 20), (0x48, 16)];
        let expected: Vec<_> = expected.iter().map(|(at, n)| (first + at, *n)).collect();
        assert_eq!(found, expected[..count]);
        let access_at = u64::from(first) + 0x34;
        space.write(access_at + 4, &[2]);
        space.write(access_at + 8, &0x1004_u32.to_le_bytes());
        space.write(access_at + 12, &4_u32.to_le_bytes());
        assert_eq!(space.reaches(access_at + 16, 4), Some((2, 0x1004)));
        assert_eq!(space.reaches(access_at + 16, 2), None);
        assert_eq!(space.reaches(access_at + 12, 4), None);
    }
}

#[test]
fn bars_size_as_the_specification_says() {
    let mut space = ConfigSpace::new(&info());
    space.write(0x10, &[0xff; 8]);
    assert_eq!(read32(&space, 0x10), 0xffff_c004);
    assert_eq!(read32(&space, 0x14), 0xffff_ffff);
    space.write(0x10, &0x0000_0012_3456_4000u64.to_le_bytes());
    assert_eq!((read32(&space, 0x10), read32(&space, 0x14)), (0x3456_4004, 0x12));
    assert_eq!(read32(&space, 0x18), 0, "BAR 2 is not there");
}

#[test]
fn writes_with_effects_are_reported() {
    let mut space = ConfigSpace::new(&info());
    assert_eq!(space.write(4, &[6, 0]), Effects { command: true, ..Effects::default() });
    assert!(space.masters_bus() && space.answers_memory());
    assert_eq!(space.write(4, &[6, 0]), Effects::default());
    let (msi, msix) = (u64::from(MSI_AT + msi::CONTROL), u64::from(MSIX_AT + msix::CONTROL));
    assert_eq!(read32(&space, MSI_AT) >> 16, 0x86, "8 vectors, 64-bit address");
    assert!(space.write(msi, &[0x21, 0]).interrupts);
    assert_eq!(space.mode(), Mode::Msi { vectors: 4 });
    assert!(space.write(msi, &[0x71, 0]).interrupts);
    assert_eq!(space.mode(), Mode::Msi { vectors: 8 }, "no more than there are");
    assert!(space.write(msix, &[0, 0x80]).interrupts);
    assert_eq!(space.mode(), Mode::Msix);
    let control = u64::from(EXPRESS_AT + express::DEVICE_CONTROL);
    assert!(space.write(control, &[0, 0x80]).reset);
    assert_eq!(read32(&space, EXPRESS_AT + express::DEVICE_CONTROL) & 0x8000, 0);
    let pmcsr = u64::from(PM_AT + pm::PMCSR);
    for not_there in [1, 2] {
        assert!(!space.write(pmcsr, &[not_there]).command);
        assert_eq!(read32(&space, PM_AT + pm::PMCSR) & 3, 0);
    }
    assert!(space.write(pmcsr, &[3]).command);
    assert!(!space.masters_bus());
    assert!(!space.write(pmcsr, &[2]).reset, "it is in D3hot still");
    let back = space.write(pmcsr, &[0]);
    assert!(back.reset && back.command);
}

proptest! {
    /// No sequence of writes changes a read-only bit, and reads beyond the space are ones.
    #[test]
    fn read_only_bits_stay(writes in prop::collection::vec((0u64..5000, prop::collection::vec(any::<u8>(), 1..16)), 0..50)) {
        let fresh = ConfigSpace::new(&info());
        let mut space = fresh.clone();
        for (offset, data) in &writes {
            space.write(*offset, data);
        }
        for at in 0..CONFIG_SPACE_SIZE {
            let fixed = !space.writable[at];
            prop_assert_eq!(space.bytes[at] & fixed, fresh.bytes[at] & fixed);
        }
        let mut beyond = [0; 4];
        space.read(4094, &mut beyond, false);
        prop_assert_eq!(&beyond[2..], &[0xff, 0xff]);
    }
}
