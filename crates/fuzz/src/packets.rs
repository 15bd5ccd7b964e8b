//! Packets in the bytes that another machine's node sends: whatever the pieces in which they come.

use rackbus_link::FramedPackets;
use rackbus_memory::packets::MAX_PACKET;

use crate::input::Input;

/// What is said in one input: packets of lengths that are mostly right, in pieces that the input chooses.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (mut framed, mut said, mut taken) = (FramedPackets::default(), Vec::new(), 0);
    while !input.is_empty() {
        match input.u8() % 4 {
            // A packet, whole.
            0 => {
                let length = (input.number() as usize).min(MAX_PACKET);
                said.extend((length as u32).to_le_bytes());
                said.resize(said.len() + length, input.u8());
            }
            // Any bytes: a length, or a part of a packet.
            1 => said.extend_from_slice(input.short()),
            // As much as has room of what was said.
            2 => taken += receive(&mut framed, &said[taken..], usize::MAX),
            _ => taken += receive(&mut framed, &said[taken..], input.u8().into()),
        }
        if said.len() > 4 * MAX_PACKET {
            break;
        }
    }
    check(framed, &said, taken);
}

/// Receives at most so many bytes; how many.
fn receive(framed: &mut FramedPackets, said: &[u8], most: usize) -> usize {
    let room = framed.room();
    let count = said.len().min(room.len()).min(most);
    room[..count].copy_from_slice(&said[..count]);
    framed.received(count);
    count
}

/// Of what was said, of which so many bytes were `taken`, the packets come in order, until one has no such length.
fn check(mut framed: FramedPackets, said: &[u8], mut taken: usize) {
    let mut rest = said;
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > MAX_PACKET {
            break;
        }
        let Some((expected, behind)) = behind.split_at_checked(length) else { break };
        let mut packet = framed.next_packet().expect("its length is right").map(<[u8]>::to_vec);
        if packet.is_none() {
            // The rest of it has room then.
            taken += receive(&mut framed, &said[taken..], usize::MAX);
            packet = framed.next_packet().expect("its length is right").map(<[u8]>::to_vec);
        }
        assert!(packet.as_deref() == Some(expected), "not the packet that was said");
        rest = behind;
    }
    receive(&mut framed, &said[taken..], usize::MAX);
    let wrong = rest.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
    match wrong.filter(|length| *length == 0 || *length > MAX_PACKET) {
        Some(_) => drop(framed.next_packet().expect_err("no packet has this length")),
        None => assert_eq!(framed.next_packet().expect("nothing is wrong"), None),
    }
}

/// Packets that come whole, in pieces, and with a length that none has.
pub fn seeds() -> Vec<Vec<u8>> {
    let longest = (MAX_PACKET as u32).to_le_bytes();
    vec![
        vec![0, 5, 7, 2, 0, 0xe7, 8, 2],
        vec![0, 5, 7, 3, 2, 3, 4, 0, 1, 9, 3, 9, 2],
        [&[0, 0xf4][..], &longest, &[1, 2, 0, 0xf4], &longest, &[2, 3, 200, 2]].concat(),
        vec![0, 3, 1, 1, 4, 0, 0, 0, 0, 2],
        vec![0, 3, 1, 1, 4, 0xff, 0xff, 0xff, 0xff, 2],
    ]
}
