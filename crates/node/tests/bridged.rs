//! Nodes of two machines that an NTB joins: segments, interrupts and frames go through it. Its windows lead into memory of this
//! process; a third host is reached by TCP.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_attach::SegmentOptions;
use rackbus_devices::class::{parse_rack, ports};
use rackbus_fabric::FabricHandle;
use rackbus_link::Link;
use rackbus_memory::SharedMemory;
use rackbus_net::address::MacAddress;
use rackbus_net::offload::Offload;
use rackbus_net::port::{NetworkPort, PortSource, SendOutcome};
use rackbus_node::NetworkService;

use common::links::{LinkKind, links};
use common::segments::{ALPHA, BETA, GAMMA, Hosts};

/// How long what is waited for may take.
const LIMIT: Duration = Duration::from_secs(30);
const LIMIT_MS: u32 = 20_000;

type Links = BTreeMap<&'static str, Arc<dyn Link>>;

/// Bytes that a host has stored into its peer's memory.
fn sent(links: &Links, host: &str) -> u64 {
    links[host].bridges().iter().map(|bridge| bridge.bytes[0]).sum()
}

#[test]
fn memory_and_interrupts_go_through_the_ntb_and_to_a_third_host_by_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let links = links(LinkKind::Ntb, folder.path());
    let rack = Hosts::joined_by(folder, &links);
    let alpha = rack.session(ALPHA);
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 1 << 20)).unwrap();
    segment.set_available().unwrap();
    let own = segment.map(0, 1 << 20).unwrap();
    let interrupt = alpha.create_interrupt(Some(5), false, true).unwrap();
    let before = sent(&links, "beta");
    for (node, is_bridged) in [(BETA, true), (GAMMA, false)] {
        let peer = rack.session(node);
        let connected = peer.connect(ALPHA, 7, LIMIT_MS).unwrap();
        let mapped = connected.map(0, 1 << 20).unwrap();
        let at = if is_bridged { 0 } else { 512 << 10 };
        for word in (at..at + (256 << 10)).step_by(4) {
            mapped.whole().store_u32(word, word as u32 ^ node, Ordering::Relaxed).unwrap();
        }
        // What was stored before is there when the interrupt is.
        peer.connect_interrupt(ALPHA, 5, LIMIT_MS).unwrap().trigger().unwrap();
        interrupt.wait(Some(LIMIT)).unwrap();
        for word in (at..at + (256 << 10)).step_by(4) {
            let found = own.whole().load_u32(word, Ordering::Relaxed).unwrap();
            assert_eq!(found, word as u32 ^ node, "at {word:#x}");
        }
        own.whole().store_u32(1 << 19, 4711, Ordering::Relaxed).unwrap();
        segment.flush().unwrap();
        assert_eq!(mapped.whole().load_u32(1 << 19, Ordering::Relaxed), Some(4711));
    }
    let through = sent(&links, "beta") - before;
    assert!((256 << 10..512 << 10).contains(&through), "{through} bytes went through the NTB");
}

/// The networks of alpha and beta, which have a network function each.
fn networks(links: &Links) -> [NetworkService; 2] {
    let file = "name = \"test\"\n[hosts.alpha.devices.n0]\nkind = \"nic\"\n\
                [hosts.beta.devices.n0]\nkind = \"nic\"\n[hosts.gamma]\n";
    let (rack, devices) = parse_rack("rack.toml", file).unwrap();
    let ports = ports(&devices);
    ["alpha", "beta"].map(|host| {
        let link = links[host].clone();
        let network = NetworkService::new(&rack, &ports, host, link.clone(), true);
        network.start(FabricHandle::of_hosts(["alpha", "beta", "gamma"]).unwrap()).unwrap();
        let (listener, attending) = (link.listen(host).unwrap(), network.clone());
        std::thread::spawn(move || {
            while let Ok(caller) = listener.accept() {
                let network = attending.clone();
                std::thread::spawn(move || caller.hear().map(|it| network.attend(it)));
            }
        });
        network
    })
}

/// A frame with this number, which fills it.
fn frame(from: MacAddress, to: MacAddress, number: u32) -> SharedMemory {
    let head = [&to.0[..], &from.0, &[0x88, 0xb5]].concat();
    let memory = SharedMemory::create("frame", 1014).unwrap();
    memory.whole().copy_from(&[head, number.to_le_bytes().repeat(250)].concat());
    memory
}

fn number_in(frame: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(frame.get(14..18)?.try_into().ok()?))
}

#[test]
fn frames_go_through_the_ntb_in_order() {
    const FRAMES: u32 = 300;
    let folder = tempfile::tempdir().unwrap();
    let links = links(LinkKind::Ntb, folder.path());
    let [near, far] = networks(&links);
    let mut ends: Vec<Box<dyn NetworkPort>> =
        vec![near.port("alpha/n0").unwrap(), far.port("beta/n0").unwrap()];
    ends.iter_mut().for_each(|port| port.attend(true));
    let macs = [ends[0].mac(), ends[1].mac()];
    for (from, to) in [(0, 1), (1, 0)] {
        let before = sent(&links, ["alpha", "beta"][from]);
        let begun = Instant::now();
        let mut bytes = vec![0; 2000];
        let (mut next, mut received) = (0, Vec::new());
        // The first one may be dropped while the conversation begins: it is sent until it is there.
        while received.last() != Some(&(FRAMES - 1)) {
            assert!(begun.elapsed() < LIMIT, "{} frames of {next}", received.len());
            if next < FRAMES {
                let memory = frame(macs[from], macs[to], next);
                let outcome = ends[from].send(Offload::default(), &[memory.whole()]);
                ends[from].flush();
                next += u32::from(outcome == SendOutcome::Done && !received.is_empty());
            }
            while let Some(it) = ends[to].next() {
                let length = it.bytes.copy_to(&mut bytes);
                received.extend(number_in(&bytes[..length]));
                ends[to].consume();
            }
        }
        assert!(received.is_sorted(), "frames came out of order");
        let through = sent(&links, ["alpha", "beta"][from]) - before;
        assert!(through > received.len() as u64 * 1014, "{through} bytes went through the NTB");
    }
}
