//! Network functions, driven as every kind of driver drives them: bytes through two functions of a card.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_devices::nic::{Nic, NicCounters, NicOptions};
use rackbus_driver::net::{Net, NetError, NetOptions};
use rackbus_driver::{DrivenFunction, InThreadFunction};
use rackbus_net::{LocalNetwork, MacAddress, PortOptions, PortRules, PortSource};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{LocalFunction, serve_function};
use rackbus_spec::virtio::feature as common;
use rackbus_spec::virtio::net::{NetHeader, feature};

/// A function of the card, on this network.
fn nic(network: &LocalNetwork, number: u16, pairs: u16, rate: Option<(u64, u64)>) -> Box<Nic> {
    let name = format!("alpha/nic0.vf{number}");
    let port = network.port(&name).unwrap();
    let options =
        NicOptions { mac: MacAddress::derived(&name), name, pairs, rate, packed_rings: true };
    Box::new(Nic::new(&options, Some(port), Arc::new(NicCounters::default())))
}

fn two(options: [NetOptions; 2]) -> [Net; 2] {
    let network = LocalNetwork::new([]);
    let mut number = 0;
    options.map(|options| {
        number += 1;
        let local = InThreadFunction::new(nic(&network, number, 4, None));
        Net::start(Box::new(local), options).unwrap()
    })
}

/// A frame from one to the other with a recognizable payload.
fn frame(from: &Net, to: [u8; 6], length: usize, seed: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from.info().mac, &[0x88, 0xb5]].concat();
    frame.extend((0..length).map(|n| (n * 7 + seed * 13) as u8));
    frame
}

/// The next frame of a function, while all of them make progress.
fn next(nets: &mut [Net; 2], of: usize, frame: &mut Vec<u8>) -> NetHeader {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        for pair in 0..2 {
            if let Some(header) = nets[of].receive(pair, frame).unwrap() {
                return header;
            }
        }
        nets[1 - of].unsent(0).unwrap();
    }
    panic!("nothing came");
}

fn features(packed: bool, event_index: bool, mergeable: bool) -> u64 {
    let without = |bit, on: bool| if on { 0 } else { bit };
    !(without(common::RING_PACKED, packed)
        | without(common::EVENT_IDX, event_index)
        | without(feature::MRG_RXBUF, mergeable))
}

#[test]
fn frames_go_through_by_every_kind_of_queue_and_stay_in_order() {
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    for (packed, event_index) in kinds {
        for (mergeable, indirect, segments, size) in
            [(false, false, 1, 64), (true, false, 3, 48), (true, true, 4, 8), (false, true, 2, 128)]
        {
            // Only a packed queue may have any size.
            let size: u16 = if packed { size } else { size.next_power_of_two() };
            let features = features(packed, event_index, mergeable);
            let buffer = if mergeable { 512 } else { 70_000 };
            let options =
                NetOptions { features, size, buffer, segments, indirect, ..NetOptions::default() };
            let mut nets = two([options; 2]);
            let context = format!("packed {packed}, event index {event_index}, {options:?}");
            let mut found = Vec::new();
            for round in 0..300 {
                let (from, to) = (round % 2, 1 - round % 2);
                let most = if mergeable { 500 * usize::from(size) } else { 60_000 };
                let length = (round * 977) % most.min(60_000);
                let sent = frame(&nets[from], nets[to].info().mac, length, round);
                assert!(nets[from].send(0, &NetHeader::default(), &sent).unwrap(), "{context}");
                nets[from].flush(0).unwrap();
                let header = next(&mut nets, to, &mut found);
                assert!(found == sent, "{context}: {} bytes, not {}", found.len(), sent.len());
                let buffers = if mergeable { (sent.len() + 12).div_ceil(512) } else { 1 };
                assert_eq!(usize::from(header.num_buffers.get()), buffers, "{context}");
            }
            // Many under way at the same time.
            let to = nets[1].info().mac;
            let (mut sent, mut received) = (0usize, 0);
            while received < 500 {
                while sent < 500 {
                    let next = frame(&nets[0], to, 100 + sent % 200, sent);
                    if !nets[0].send(0, &NetHeader::default(), &next).unwrap() {
                        break;
                    }
                    sent += 1;
                }
                nets[0].flush(0).unwrap();
                nets[0].unsent(0).unwrap();
                while nets[1].receive(0, &mut found).unwrap().is_some() {
                    assert!(
                        found == frame(&nets[0], to, 100 + received % 200, received),
                        "{context}"
                    );
                    received += 1;
                }
            }
            assert!(!nets[0].is_broken().unwrap() && !nets[1].is_broken().unwrap());
        }
    }
}

/// A TCP segment over IPv4 of this payload, whose checksum is left to others.
fn segment(from: &Net, to: [u8; 6], payload: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from.info().mac, &[8, 0, 0x45, 0]].concat();
    frame.extend(((40 + payload) as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0x30, 0x39, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    // The sum of the pseudo header, as a sender leaves it.
    let sum = 0x0a00u32 + 1 + 0x0a00 + 2 + 6 + 20 + payload as u32;
    let sum = (sum & 0xffff) + (sum >> 16);
    frame[50..52].copy_from_slice(&(sum as u16).to_be_bytes());
    frame.extend((0..payload).map(|n| n as u8));
    frame
}

fn offload(gso_size: u16) -> NetHeader {
    NetHeader {
        flags: 1,
        gso_type: if gso_size > 0 { 1 } else { 0 },
        hdr_len: 54.into(),
        gso_size: gso_size.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..NetHeader::default()
    }
}

fn checksum(segment: &[u8]) -> u16 {
    let mut sum = 0x0a00u32 + 1 + 0x0a00 + 2 + 6 + segment.len() as u32;
    for word in segment.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[test]
fn what_a_sender_leaves_to_others_goes_along_or_is_done_for_who_takes_no_such_frames() {
    let without =
        |features: u64| NetOptions { features: !features, buffer: 70_000, ..NetOptions::default() };
    let takes_all = without(0);
    for (receiver, expected) in [
        (takes_all, 1),
        (without(feature::GUEST_TSO4 | feature::GUEST_ECN), 7),
        (without(feature::GUEST_OFFLOADS), 7),
    ] {
        let mut nets = two([takes_all, receiver]);
        let to = nets[1].info().mac;
        let large = segment(&nets[0], to, 9000);
        nets[0].send(0, &offload(1448), &large).unwrap();
        nets[0].flush(0).unwrap();
        let (mut found, mut payload) = (Vec::new(), Vec::new());
        for _ in 0..expected {
            let header = next(&mut nets, 1, &mut found);
            if expected == 1 {
                assert_eq!(header, NetHeader { num_buffers: 1.into(), ..offload(1448) });
                assert_eq!(found, large);
            } else {
                assert_eq!((header.flags, header.gso_type), (0, 0));
                assert_eq!(checksum(&found[34..]), 0);
            }
            payload.extend_from_slice(&found[54..]);
        }
        assert!(payload == large[54..]);
        assert!(nets[1].receive(0, &mut found).unwrap().is_none());
        let small = segment(&nets[0], to, 700);
        nets[0].send(0, &offload(0), &small).unwrap();
        nets[0].flush(0).unwrap();
        let header = next(&mut nets, 1, &mut found);
        if receiver.features & feature::GUEST_CSUM != 0 {
            assert_eq!((header.flags, &found), (1, &small));
        } else {
            assert_eq!((header.flags, checksum(&found[34..])), (0, 0));
        }
    }
}

#[test]
fn a_sender_may_offload_only_what_it_negotiated_and_what_is_valid() {
    let plain =
        NetOptions { features: !(feature::CSUM | feature::HOST_TSO4), ..NetOptions::default() };
    let plain = NetOptions {
        features: plain.features
            & !(feature::HOST_TSO6 | feature::HOST_ECN | feature::HOST_UFO | feature::HOST_USO),
        ..plain
    };
    let mut nets = two([plain, NetOptions::default()]);
    let to = nets[1].info().mac;
    let sent = segment(&nets[0], to, 700);
    for header in [offload(0), offload(500), NetHeader { gso_type: 77, ..NetHeader::default() }] {
        assert!(nets[0].send(0, &header, &sent).unwrap());
    }
    nets[0].send(0, &NetHeader::default(), &sent).unwrap();
    nets[0].flush(0).unwrap();
    let mut found = Vec::new();
    next(&mut nets, 1, &mut found);
    assert_eq!(found, sent);
    assert!(nets[1].receive(0, &mut found).unwrap().is_none(), "one of the others came, too");
}

#[test]
fn only_frames_that_a_driver_wants_reach_it() {
    let mut nets = two([NetOptions::default(); 2]);
    let own = nets[1].info().mac;
    let group = [0x33, 0x33, 0, 0, 0, 9];
    let mut found = Vec::new();
    let reaches = |nets: &mut [Net; 2], to: [u8; 6], found: &mut Vec<u8>| {
        let sent = frame(&nets[0], to, 100, 1);
        nets[0].send(0, &NetHeader::default(), &sent).unwrap();
        // One behind it that comes in any case.
        let mark = frame(&nets[0], [0xff; 6], 60, 2);
        nets[0].send(0, &NetHeader::default(), &mark).unwrap();
        nets[0].flush(0).unwrap();
        next(nets, 1, found);
        let came = *found == sent;
        if came {
            next(nets, 1, found);
        }
        assert_eq!(*found, mark);
        came
    };
    assert!(reaches(&mut nets, own, &mut found));
    assert!(!reaches(&mut nets, group, &mut found));
    let table = [&0u32.to_le_bytes()[..], &1u32.to_le_bytes(), &group].concat();
    assert!(nets[1].command((1, 0), &table).unwrap());
    assert!(reaches(&mut nets, group, &mut found));
    // The address belongs to the port: a driver may set it to what it is, and to nothing else.
    let other = [2, 0, 0, 7, 7, 7];
    assert!(!nets[1].command((1, 1), &other).unwrap());
    assert!(!reaches(&mut nets, other, &mut found));
    assert!(nets[1].command((1, 1), &own).unwrap());
    assert!(reaches(&mut nets, own, &mut found));
    assert!(!nets[1].command((9, 9), &[]).unwrap());
}

#[test]
fn several_pairs_share_flows_and_keep_each_in_order() {
    let options = NetOptions { pairs: 4, ..NetOptions::default() };
    let mut nets = two([options; 2]);
    assert_eq!(nets[0].info().pairs, 4);
    let to = nets[1].info().mac;
    let mut used = [0; 4];
    let mut seen = [0u8; 32];
    let mut found = Vec::new();
    for number in 0..640usize {
        let flow = number % 32;
        let mut sent = segment(&nets[0], to, 100);
        sent[34] = flow as u8;
        sent[60] = (number / 32) as u8;
        nets[0].send((flow % 4) as u16, &NetHeader::default(), &sent).unwrap();
        nets[0].flush((flow % 4) as u16).unwrap();
        for pair in 0..4 {
            nets[0].unsent(pair).unwrap();
        }
        for pair in 0..4 {
            while nets[1].receive(pair, &mut found).unwrap().is_some() {
                used[usize::from(pair)] += 1;
                let flow = usize::from(found[34]);
                assert_eq!(found[60], seen[flow], "flow {flow} is out of order");
                seen[flow] += 1;
            }
        }
    }
    assert!(used.iter().all(|count| *count > 0), "{used:?}");
    assert_eq!(used.iter().sum::<u32>(), 640);
}

fn served(
    folder: &Path,
    network: &LocalNetwork,
    number: u16,
) -> (LocalFunction, std::path::PathBuf) {
    let socket = folder.join(format!("vf{number}.sock"));
    let model = nic(network, number, 2, None);
    (serve_function(model, &socket, EngineOptions::default()).unwrap(), socket)
}

/// Functions on engines of their own, which sleep; drivers that sleep, too.
#[test]
fn a_sleeping_driver_is_woken() {
    let folder = tempfile::tempdir().unwrap();
    let network = LocalNetwork::new([]);
    let (_first, one) = served(folder.path(), &network, 1);
    let (_second, two) = served(folder.path(), &network, 2);
    for (packed, event_index) in [(false, false), (false, true), (true, false), (true, true)] {
        let features = features(packed, event_index, true);
        let options = NetOptions { features, interrupts: true, ..NetOptions::default() };
        let limit = Duration::from_secs(10);
        let mut a = Net::open(&one, limit, options).unwrap();
        let mut b = Net::open(&two, limit, options).unwrap();
        assert!(a.is_up().unwrap() && b.is_up().unwrap());
        let to = b.info().mac;
        let echo = std::thread::spawn(move || {
            let mut frame = Vec::new();
            let mut left = 50;
            while left > 0 {
                match b.receive(0, &mut frame).unwrap() {
                    None => b.wait(0, Duration::from_secs(10)),
                    Some(_) => {
                        let (to, from) = frame.split_at_mut(6);
                        to.swap_with_slice(&mut from[..6]);
                        assert!(b.send(0, &NetHeader::default(), &frame).unwrap());
                        b.flush(0).unwrap();
                        left -= 1;
                    }
                }
            }
            // The answers have to leave before the function is given back.
            while b.unsent(0).unwrap() > 0 {
                std::thread::yield_now();
            }
            b
        });
        let mut found = Vec::new();
        for round in 0..50 {
            let sent = frame(&a, to, 64 + round, round);
            if round % 10 == 0 {
                // So that the engines sleep.
                std::thread::sleep(Duration::from_millis(2));
            }
            assert!(a.send(0, &NetHeader::default(), &sent).unwrap());
            a.flush(0).unwrap();
            let begun = Instant::now();
            while a.receive(0, &mut found).unwrap().is_none() {
                assert!(begun.elapsed() < Duration::from_secs(30), "no answer to {round}");
                a.wait(0, Duration::from_secs(10));
            }
            assert_eq!(found[12..], sent[12..]);
        }
        drop(echo.join().unwrap());
    }
}

/// Bytes a second that a function may send and receive, and at once.
const RATE: u64 = 1_000_000;
const AT_ONCE: u64 = 65_536;

#[test]
fn a_rate_is_kept_in_both_directions() {
    /// Bytes that take a tenth of a second at the rate.
    const WINDOW: u64 = RATE / 10;
    /// How late the functions' clock may be, and a frame that was begun with what was left.
    const LATE: Duration = Duration::from_millis(20);
    let network = LocalNetwork::new([]);
    let options = NetOptions { pairs: 1, ..NetOptions::default() };
    let start = |number, rate| {
        let local = InThreadFunction::new(nic(&network, number, 1, rate));
        Net::start(Box::new(local), options).unwrap()
    };
    let mut nets = [start(1, Some((RATE, AT_ONCE))), start(2, None)];
    for (from, to) in [(0, 1), (1, 0)] {
        let sent = frame(&nets[from], nets[to].info().mac, 1486, 1);
        // Functions in this thread look at the clock now and then: now they have.
        for _ in 0..1000 {
            for net in &mut nets {
                net.unsent(0).unwrap();
            }
        }
        let (begun, mut received, mut found) = (Instant::now(), 0u64, Vec::new());
        let mut windows = Vec::new();
        // What may go at once is in the first one. A machine that is busy with others keeps a window from all that it may have,
        // and the next one may have that beside its own, but not all windows.
        while windows.len() < 30 && at_the_rate(&windows) < 3 {
            let (window, until) = (Instant::now(), received + WINDOW);
            while received < until {
                nets[from].send(0, &NetHeader::default(), &sent).unwrap();
                nets[from].flush(0).unwrap();
                while nets[to].receive(0, &mut found).unwrap().is_some() {
                    received += found.len() as u64;
                }
            }
            windows.push(window.elapsed());
            // And what the clock was late by when it began.
            let most = AT_ONCE as f64 + (begun.elapsed() + LATE).as_secs_f64() * RATE as f64;
            assert!(received as f64 <= most, "{received} bytes, not {most}");
        }
        assert!(at_the_rate(&windows) >= 3, "{windows:?}");
    }
}

/// How many of the windows took a tenth of a second, within a tenth of that.
fn at_the_rate(windows: &[Duration]) -> usize {
    let fits = |it: &&Duration| (90..=110).contains(&it.as_millis());
    windows.iter().skip(1).filter(fits).count()
}

#[test]
fn a_function_without_a_network_has_its_link_down() {
    let name = "alpha/nic0.vf1".to_owned();
    let mac = MacAddress::derived(&name);
    let options = NicOptions { mac, name, pairs: 1, rate: None, packed_rings: true };
    let local =
        InThreadFunction::new(Box::new(Nic::new(&options, None, Arc::new(NicCounters::default()))));
    let mut net = Net::start(Box::new(local), NetOptions::default()).unwrap();
    assert!(!net.is_up().unwrap());
    assert_eq!(net.info().mac, mac.0);
    let sent = frame(&net, [0xff; 6], 100, 1);
    net.send(0, &NetHeader::default(), &sent).unwrap();
    net.flush(0).unwrap();
    while net.unsent(0).unwrap() > 0 {}
}

#[test]
fn functions_in_vlans_of_their_own_reach_their_own_and_spoofed_frames_nobody() {
    let rules = |vlan| PortRules { vlan, ..PortRules::default() };
    let port = |vlan, anti_spoofing| PortOptions { mac: None, rules: rules(vlan), anti_spoofing };
    let network = LocalNetwork::new([
        ("alpha/nic0.vf1".to_owned(), port(Some(7), true)),
        ("alpha/nic0.vf2".to_owned(), port(Some(7), false)),
        ("alpha/nic0.vf3".to_owned(), port(None, false)),
    ]);
    let mut nets = [1, 2, 3].map(|number| {
        let local = InThreadFunction::new(nic(&network, number, 1, None));
        Net::start(Box::new(local), NetOptions::default()).unwrap()
    });
    let good = frame(&nets[0], [0xff; 6], 100, 1);
    let mut spoofed = good.clone();
    spoofed[11] ^= 1;
    for sent in [&spoofed, &good] {
        nets[0].send(0, &NetHeader::default(), sent).unwrap();
    }
    nets[0].flush(0).unwrap();
    while nets[0].unsent(0).unwrap() > 0 {}
    let mut found = Vec::new();
    while nets[1].receive(0, &mut found).unwrap().is_none() {}
    assert_eq!(found, good);
    for other in &mut nets[1..] {
        assert!(other.receive(0, &mut found).unwrap().is_none());
    }
}

/// A driver that accepts what goes only together is refused, and what is no network function.
#[test]
fn features_are_accepted_together_or_not_at_all() {
    let network = LocalNetwork::new([]);
    let local =
        || Box::new(InThreadFunction::new(nic(&network, 1, 1, None))) as Box<dyn DrivenFunction>;
    let features = !feature::GUEST_CSUM;
    let refused = Net::start(local(), NetOptions { features, ..NetOptions::default() });
    assert!(matches!(refused, Err(NetError::Features(_))), "{refused:?}");
    let few = Net::start(local(), NetOptions { pairs: 2, ..NetOptions::default() });
    assert!(matches!(few, Err(NetError::Request(_))), "{few:?}");
    Net::start(local(), NetOptions::default()).unwrap();
}
