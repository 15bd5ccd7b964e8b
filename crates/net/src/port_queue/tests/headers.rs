//! Frames whose headers are longer than what is looked at of others.

use super::*;
use crate::offload::{GSO_TCPV6, NEEDS_CSUM};

/// A large segment of TCP from the first station to the second, with options for its destination that are longer than what
/// is looked at of other frames.
fn segment_with_long_headers(world: &World) -> (Vec<u8>, Offload) {
    const OPTIONS: usize = 8 * 26;
    let all = world.stations.all();
    let mut frame = [&all[1].mac.0[..], &all[0].mac.0, &[0x86, 0xdd, 0x60, 0, 0, 0]].concat();
    frame.extend((OPTIONS as u16 + 20 + 20_000).to_be_bytes());
    frame.extend([60, 64]);
    frame.extend([all[0].ipv6.octets(), all[1].ipv6.octets()].concat());
    frame.extend([&[6, OPTIONS as u8 / 8 - 1, 1, 4][..], &[0; OPTIONS - 4]].concat());
    let transport = frame.len();
    frame.extend([&[0; 12][..], &[0x50, 0x10, 1, 0, 0, 0, 0, 0]].concat());
    frame.extend((0..20_000).map(|n| n as u8));
    let offload = Offload {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV6,
        gso_size: 1000.into(),
        csum_start: (transport as u16).into(),
        csum_offset: 16.into(),
        ..Offload::default()
    };
    (frame, offload)
}

#[test]
fn a_large_segment_with_long_headers_stays_one_frame() {
    let mut world = World::new(1);
    let (frame, offload) = segment_with_long_headers(&world);
    assert_eq!(world.queues[0].send_checked(offload, &frame, &[]), SendOutcome::Full);
    world.answer(true);
    let memory = SharedMemory::create("frame", 32 << 10).unwrap();
    memory.whole().copy_from(&frame);
    let parts = [(0, 100), (100, frame.len() - 100)]
        .map(|(at, length)| memory.whole().part(at, length).unwrap());
    assert_eq!(world.queues[0].send_checked(offload, &frame, &[]), SendOutcome::Done);
    assert_eq!(world.queues[0].send(offload, &parts), SendOutcome::Done);
    world.queues[0].flush();
    for _ in 0..2 {
        let found = world.queues[1].next().unwrap();
        assert_eq!(found.offload, offload);
        let mut bytes = vec![0; found.bytes.len()];
        found.bytes.copy_to(&mut bytes);
        assert!(bytes == frame);
        world.queues[1].consume();
    }
    // What one of its pieces would be too long for the network is not taken.
    let large = Offload { gso_size: 1300.into(), ..offload };
    let sent = world.queues[0].send(large, &parts);
    assert_eq!(sent, SendOutcome::Dropped(Cause::Offload));
}
