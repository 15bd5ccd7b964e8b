//! Multicast groups, and pages of the pool.

use std::sync::Arc;

use rackbus_attach::{
    BROADCAST_NODE, ConnectionChange, Refusal, SegmentAccess, SegmentEvent, SegmentKind,
    SegmentOptions,
};

use crate::common::segments::{ALPHA, BETA, GAMMA, Hosts};
use crate::support::{LIMIT, SOON, answered, refusal, until, word};

#[test]
fn one_store_reaches_every_member_of_a_group() {
    let rack = Hosts::start(|link| Arc::new(link));
    let sessions = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 4096) };
    assert_eq!(refusal(answered(|| sessions[1].connect(252, 3, LIMIT))), Refusal::NoSuchSegment);
    // A member's memory is that of the group.
    let members = [1, 2].map(|n: usize| sessions[n].create_segment(&options).unwrap());
    let sender = answered(|| sessions[0].connect(252, 3, LIMIT)).unwrap();
    sender.map(0, 8).unwrap().whole().write_obj(0, &8_u64).unwrap();
    for member in &members {
        assert_eq!(word(&member.map(0, 8).unwrap(), 0), 8);
    }
    drop(members);
    assert_eq!(sender.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Removed)));
}

#[test]
fn the_senders_of_a_group_are_told_whether_its_last_member_left_in_order_or_died() {
    let rack = Hosts::start(|link| Arc::new(link));
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 4096) };
    let (removed, lost) = (ConnectionChange::Removed, ConnectionChange::Lost);
    let home = rack.session(ALPHA);
    // A group's home is alpha: the last member is there, or elsewhere.
    for (last, sender) in [(ALPHA, BETA), (BETA, ALPHA), (BETA, GAMMA), (GAMMA, GAMMA)] {
        for (first_dies, last_dies, told) in
            [(false, false, removed), (true, false, removed), (false, true, lost)]
        {
            let members = [GAMMA, last].map(|node| {
                let session = rack.session(node);
                let segment = session.create_segment(&options).unwrap();
                (session, segment)
            });
            let sender =
                answered(|| rack.session(sender).connect(BROADCAST_NODE, 3, LIMIT)).unwrap();
            sender.map(0, 8).unwrap().whole().write_obj(0, &8_u64).unwrap();
            for ((session, member), dies) in members.into_iter().zip([first_dies, last_dies]) {
                if dies {
                    session.close();
                }
                drop(member);
                // Hosts are heard in no order: the home has heard of the first before the last one goes.
                until(|| home.segments().unwrap().iter().all(|it| it.connections.len() < 3));
            }
            assert_eq!(sender.watch().wait(SOON), Some(SegmentEvent::Remote(told)));
            assert_eq!(word(&sender.map(0, 8).unwrap(), 0), 8);
        }
    }
}

#[test]
fn pages_are_open_to_one_host_until_they_are_closed() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta, gamma) = (rack.session(ALPHA), rack.session(BETA), rack.session(GAMMA));
    let extent = alpha.allocate(16 * 4096).unwrap();
    let mine = extent.mapping();
    for page in 0..16_u64 {
        mine.whole().write_obj(page as usize * 4096, &(100 + page)).unwrap();
    }
    let page = |n: u64| extent.address() + n * 4096;
    assert_eq!(refusal(beta.map_pages(page(2), 4096)), Refusal::Denied);
    extent.open(2 * 4096, 2 * 4096, BETA, true).unwrap();
    extent.open(4 * 4096, 4096, BETA, false).unwrap();

    let there = beta.map_pages(page(2), 3 * 4096).unwrap();
    let words = |mapping: &rackbus_attach::Mapping| [0, 4096, 8192].map(|at| word(mapping, at));
    assert_eq!(words(there.mapping()), [102, 103, 104]);
    assert!(!there.writable());
    let there = beta.map_pages(page(2), 2 * 4096).unwrap();
    there.mapping().whole().write_obj(4096, &7_u64).unwrap();
    assert_eq!(word(mine, 3 * 4096), 7);
    assert_eq!(refusal(gamma.map_pages(page(2), 4096)), Refusal::Denied);
    // Neither more than was opened, nor a part of it.
    assert_eq!(refusal(beta.map_pages(page(1), 2 * 4096)), Refusal::Denied);
    assert_eq!(refusal(beta.map_pages(page(2), 4096)), Refusal::Denied);

    extent.close(2 * 4096, 2 * 4096).unwrap();
    assert_eq!(there.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Revoked)));
    assert_eq!(word(mine, 3 * 4096), 7);
    mine.whole().write_obj(3 * 4096, &8_u64).unwrap();
    assert_eq!(word(there.mapping(), 4096), 0);
    there.mapping().whole().write_obj(4096, &9_u64).unwrap();
    assert_eq!(word(mine, 3 * 4096), 8);
    assert_eq!(refusal(beta.map_pages(page(2), 2 * 4096)), Refusal::Denied);
    // To another host now.
    extent.open(2 * 4096, 4096, GAMMA, true).unwrap();
    assert_eq!(word(gamma.map_pages(page(2), 4096).unwrap().mapping(), 0), 102);
}

#[test]
fn pages_whose_owner_frees_them_or_dies_keep_their_last_content_for_those_who_map_them() {
    let rack = Hosts::start(|link| Arc::new(link));
    for (dies, told) in [(false, ConnectionChange::Removed), (true, ConnectionChange::Lost)] {
        let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
        let extent = alpha.allocate(4 * 4096).unwrap();
        let address = extent.address();
        extent.open(0, 4096, BETA, true).unwrap();
        extent.open(4096, 4096, BETA, false).unwrap();
        let kept = beta.map_pages(address, 4096).unwrap();
        let closed = beta.map_pages(address + 4096, 4096).unwrap();
        extent.mapping().whole().write_obj(4096, &4_u64).unwrap();
        extent.close(4096, 4096).unwrap();
        kept.mapping().whole().write_obj(0, &7_u64).unwrap();
        if dies {
            alpha.close();
        }
        drop(extent);
        assert_eq!(kept.watch().wait(SOON), Some(SegmentEvent::Remote(told)));
        assert_eq!(word(kept.mapping(), 0), 7);
        assert_eq!(word(closed.mapping(), 0), 0, "it was taken away before");
        // The next owner of the place has memory of its own.
        let next = rack.session(ALPHA).allocate(4 * 4096).unwrap();
        assert_eq!((next.address(), word(next.mapping(), 0)), (address, 0));
        kept.mapping().whole().write_obj(0, &8_u64).unwrap();
        assert_eq!(word(next.mapping(), 0), 0);
        assert_eq!(refusal(beta.map_pages(address, 4096)), Refusal::Denied);
    }
}

#[test]
fn a_group_is_for_those_whom_its_home_allows() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta, gamma) = (rack.session(ALPHA), rack.session(BETA), rack.session(GAMMA));
    alpha.set_share(3..=3, Some(GAMMA), SegmentAccess::None).unwrap();
    alpha.set_share(3..=3, Some(BETA), SegmentAccess::Read).unwrap();
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 4096) };
    let member = alpha.create_segment(&options).unwrap();
    assert_eq!(refusal(gamma.create_segment(&options)), Refusal::Denied);
    assert_eq!(refusal(answered(|| gamma.connect(BROADCAST_NODE, 3, LIMIT))), Refusal::Denied);
    assert_eq!(refusal(beta.create_segment(&options)), Refusal::Denied);
    let reader = answered(|| beta.connect(BROADCAST_NODE, 3, LIMIT)).unwrap();
    assert!(!reader.writable());
    member.map(0, 8).unwrap().whole().write_obj(0, &5_u64).unwrap();
    assert_eq!(word(&reader.map(0, 8).unwrap(), 0), 5);
}

#[test]
fn a_rule_that_changes_reaches_the_members_and_senders_of_a_group() {
    let rack = Hosts::start(|link| Arc::new(link));
    let [alpha, beta, gamma] = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 8192) };
    let members = [&alpha, &beta, &gamma].map(|session| session.create_segment(&options).unwrap());
    let sender = answered(|| rack.session(GAMMA).connect(252, 3, LIMIT)).unwrap();
    let maps = members.each_ref().map(|member| member.map(0, 8192).unwrap());
    let sends = sender.map(0, 8192).unwrap();
    sends.whole().write_obj(4096, &1_u64).unwrap();
    assert_eq!(maps.each_ref().map(|map| word(map, 4096)), [1; 3]);

    let listed = alpha.segments().unwrap();
    assert_eq!((listed[0].id, listed[0].size, listed[0].group), (3, 8192, true));
    assert_eq!(listed[0].connections, [ALPHA, BETA, GAMMA, GAMMA]);
    // Whoever may only load is as much too many for a member as who may do nothing.
    alpha.set_share(3..=3, Some(GAMMA), SegmentAccess::Read).unwrap();
    maps[0].whole().write_obj(4096, &2_u64).unwrap();
    assert_eq!(maps.each_ref().map(|map| word(map, 4096)), [2, 2, 0]);
    assert_eq!(word(&sends, 4096), 0);
    sends.whole().write_obj(0, &9_u64).unwrap();
    maps[2].whole().write_obj(0, &9_u64).unwrap();
    assert_eq!([&maps[0], &maps[1]].map(|map| word(map, 0)), [0, 0]);
    for watch in [members[2].watch(), sender.watch()] {
        assert_eq!(watch.wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Revoked)));
    }
    assert_eq!(refusal(gamma.create_segment(&options)), Refusal::Denied);
    // The others' mappings that are made later are of the same memory, and they have a group still.
    maps[1].whole().write_obj(8, &3_u64).unwrap();
    assert_eq!(word(&members[0].map(0, 16).unwrap(), 8), 3);
    let reader = answered(|| rack.session(GAMMA).connect(252, 3, LIMIT)).unwrap();
    assert!(!reader.writable());
    let reads = reader.map(0, 16).unwrap();
    assert_eq!(word(&reads, 8), 3);

    // Who released it before the rule was changed keeps nothing of it either.
    drop(reader);
    alpha.set_share(3..=3, None, SegmentAccess::None).unwrap();
    assert_eq!(word(&reads, 8), 0);
    assert_eq!(word(&maps[1], 8), 0);
    assert_eq!(word(&maps[0], 8), 3, "the home's own process may always");
}

#[test]
fn a_member_of_another_size_is_told_which_one_the_group_has() {
    let rack = Hosts::start(|link| Arc::new(link));
    let of = |size| SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, size) };
    let _first = rack.session(BETA).create_segment(&of(8192)).unwrap();
    let second = refusal(rack.session(GAMMA).create_segment(&of(4096)));
    assert_eq!(second, Refusal::OtherSize { size: 8192 });
    assert!(second.to_string().contains("8192"));
}
