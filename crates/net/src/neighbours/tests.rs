use proptest::prelude::*;

use super::*;
use crate::switch::StationSwitch;
use crate::vlan::FrameVlan;

const ASKER: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
const OWNER: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);

/// An ARP request of `from` for `about`, as Linux sends it.
fn arp(asker: MacAddress, from: Ipv4Addr, about: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&MacAddress::BROADCAST.0[..], &asker.0, &ARP.to_be_bytes()].concat();
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(asker.0);
    frame.extend(from.octets());
    frame.extend([0; 6]);
    frame.extend(about.octets());
    frame
}

/// A neighbour solicitation of `from` for `about`, as Linux sends it.
fn solicitation(asker: MacAddress, from: Ipv6Addr, about: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = about.octets();
    let mut frame = [&[0x33, 0x33, 0xff, a, b, c][..], &asker.0, &IPV6.to_be_bytes()].concat();
    frame.extend([0x60, 0, 0, 0, 0, 32, 58, 255]);
    frame.extend(from.octets());
    frame.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend(about.octets());
    frame.extend([1, 1]);
    frame.extend(asker.0);
    complete(&mut frame);
    frame
}

/// Writes the checksum of an ICMPv6 message.
fn complete(frame: &mut [u8]) {
    frame[56..58].fill(0);
    let checksum = checksum(&frame[14..54], &frame[54..]);
    frame[56..58].copy_from_slice(&checksum.to_be_bytes());
}

fn v4() -> (Ipv4Addr, Ipv4Addr) {
    ([10, 77, 0, 1].into(), [10, 77, 128, 2].into())
}

fn v6() -> (Ipv6Addr, Ipv6Addr) {
    let address = |last| Ipv6Addr::new(0xfd72, 0x6163, 0x6b62, 0, 0, 0, 0x80, last);
    (address(1), address(2))
}

#[test]
fn an_answer_is_what_the_owner_would_say() {
    let (from, about) = v4();
    let question = NeighbourQuestion::read(&arp(ASKER, from, about)).unwrap();
    assert_eq!(question.about(), IpAddr::from(about));
    let mut expected = [&ASKER.0[..], &OWNER.0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2]].concat();
    expected.extend([&OWNER.0[..], &about.octets(), &ASKER.0, &from.octets()].concat());
    assert_eq!(question.answer(OWNER), expected);

    let (from, about) = v6();
    let question = NeighbourQuestion::read(&solicitation(ASKER, from, about)).unwrap();
    assert_eq!(question.about(), IpAddr::from(about));
    let answer = question.answer(OWNER);
    assert_eq!(answer.len(), LONGEST_ANSWER);
    let beginning = [&ASKER.0[..], &OWNER.0, &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255]].concat();
    assert_eq!(answer[..22], beginning);
    assert_eq!(answer[22..54], [about.octets(), from.octets()].concat());
    // Asked for, and in the place of what was known.
    assert_eq!((&answer[54..56], &answer[58..62]), (&[136, 0][..], &[0x60, 0, 0, 0][..]));
    assert_eq!(answer[62..], [&about.octets()[..], &[2, 1], &OWNER.0].concat());
    assert_eq!(checksum(&answer[14..54], &answer[54..]), 0);
}

#[test]
fn probes_and_announcements_and_what_is_for_one_station_are_no_questions() {
    let is_one = |frame: &[u8]| NeighbourQuestion::read(frame).is_some();
    let (from, about) = v4();
    assert!(is_one(&arp(ASKER, from, about)));
    assert!(!is_one(&arp(ASKER, Ipv4Addr::UNSPECIFIED, about)), "a probe");
    assert!(!is_one(&arp(ASKER, about, about)), "an announcement");
    let mut other = arp(ASKER, from, about);
    other[..6].copy_from_slice(&OWNER.0);
    assert!(!is_one(&other), "for one station");
    for (at, what) in
        [(21, "a reply"), (15, "not Ethernet"), (18, "long addresses"), (22, "another's")]
    {
        let mut other = arp(ASKER, from, about);
        other[at] ^= 3;
        assert!(!is_one(&other), "{what}");
    }
    let (from, about) = v6();
    assert!(is_one(&solicitation(ASKER, from, about)));
    assert!(!is_one(&solicitation(ASKER, Ipv6Addr::UNSPECIFIED, about)), "a probe");
    assert!(!is_one(&solicitation(ASKER, about, about)));
    for (at, what) in [
        (21, "forwarded"),
        (20, "another protocol"),
        (54, "another message"),
        (53, "another group"),
        (19, "longer than it is"),
    ] {
        let mut other = solicitation(ASKER, from, about);
        other[at] ^= 8;
        complete(&mut other);
        assert!(!is_one(&other), "{what}");
    }
    let mut other = solicitation(ASKER, from, about);
    other[56] ^= 1;
    assert!(!is_one(&other), "a wrong checksum");
}

#[test]
fn what_is_behind_a_service_tag_or_two_tags_is_the_question_of_another_network() {
    let (from, about) = v4();
    let is_one = |tags: &[u8]| {
        let mut frame = arp(ASKER, from, about);
        frame.splice(12..12, tags.iter().copied());
        NeighbourQuestion::read(&frame).is_some()
    };
    assert!(is_one(&[]) && is_one(&[0x81, 0, 0, 7]));
    assert!(!is_one(&[0x88, 0xa8, 0, 7]) && !is_one(&[0x81, 0, 0, 7, 0x81, 0, 0, 7]));
}

/// Two hosts, of which beta is in a VLAN, with a function each, and an uplink.
fn stations() -> Vec<Station> {
    let text = "name = \"lab\"\n[network]\nuplinks = [\"alpha/eth0\"]\n[network.host.beta]\nvlan = 7\n\
                [hosts.alpha.devices.nic0]\nkind = \"nic\"\n[hosts.beta.devices.nic0]\nkind = \"nic\"\n";
    crate::addressing::tests::with_ports(text).all().to_vec()
}

const ALPHA: usize = 0;
const BETA: usize = 1;
const ASKING: usize = 2;
const ASKED: usize = 3;
const UPLINK: usize = 4;

#[test]
fn the_addresses_of_stations_in_the_vlan_of_the_asker_are_known() {
    let all = stations();
    let switch = StationSwitch::new(&all, 1500, 100);
    let asks = |from: usize, about: usize, vlan: u16| {
        let (own, other) = (&all[from], &all[about]);
        let vlan = FrameVlan::untagged(vlan);
        let frames = [
            arp(own.mac, [10, 77, 9, 9].into(), other.ipv4),
            solicitation(own.mac, v6().0, other.ipv6),
        ];
        frames.map(|frame| switch.answer(from, &vlan, &frame).map(|answer| answer[6..12].to_vec()))
    };
    for about in [ALPHA, ASKED] {
        let expected = Some(all[about].mac.0.to_vec());
        assert_eq!(asks(ASKING, about, 0), [expected.clone(), expected]);
    }
    let nothing = [None, None];
    assert_eq!(asks(ASKING, BETA, 0), nothing, "it is in another VLAN");
    assert_eq!(asks(ASKING, ASKING, 0), nothing, "its own");
    assert_eq!(asks(ASKING, UPLINK, 0), nothing, "it has none");
    assert_eq!(asks(UPLINK, ALPHA, 0), nothing, "who is outside asks the station");
}

proptest! {
    /// Whatever a frame says, an answer is a frame for its sender from another station, about an address of that one.
    #[test]
    fn an_answer_is_for_who_asked_and_from_who_has_the_address(
        asks in 0usize..4, about in 0usize..4, six in any::<bool>(),
        changes in prop::collection::vec((0usize..86, any::<u8>()), 0..3), cut in 0usize..200,
        mends in any::<bool>(),
    ) {
        let all = stations();
        let switch = StationSwitch::new(&all, 1500, 100);
        let (own, other) = (&all[asks], &all[about]);
        let mut frame = match six {
            true => solicitation(own.mac, own.ipv6, other.ipv6),
            false => arp(own.mac, own.ipv4, other.ipv4),
        };
        for (at, byte) in changes {
            if let Some(place) = frame.get_mut(at) {
                *place = byte;
            }
        }
        if six && mends {
            complete(&mut frame);
        }
        frame.truncate(cut.max(20));
        let asker = MacAddress(frame[6..12].try_into().unwrap());
        if let Some(answer) = switch.answer(asks, &FrameVlan::untagged(0), &frame) {
            let header = EthernetHeader::read(&answer).unwrap();
            prop_assert_eq!(header.to, asker);
            let owner = all.iter().position(|it| it.mac == header.from).unwrap();
            prop_assert!(owner != asks && [ALPHA, ASKING, ASKED].contains(&owner));
            let about = match header.kind {
                ARP => answer[28..32] == all[owner].ipv4.octets() && answer[22..28] == header.from.0,
                _ => answer[22..38] == all[owner].ipv6.octets() && answer[62..78] == answer[22..38],
            };
            prop_assert!(about);
        }
    }

    #[test]
    fn no_bytes_make_it_fail(frame in prop::collection::vec(any::<u8>(), 0..200), kind in 0usize..3) {
        let mut frame = frame;
        if frame.len() > 14 {
            frame[0] |= 1;
            frame[12..14].copy_from_slice(&[ARP, IPV6, 0x8100][kind].to_be_bytes());
        }
        NeighbourQuestion::read(&frame);
    }
}
