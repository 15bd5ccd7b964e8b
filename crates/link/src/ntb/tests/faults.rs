//! What ends the link through an NTB, or does not let it begin: cables that lead elsewhere, other versions, threads that fail, and
//! conversations of which nobody takes the rest.

use std::sync::atomic::AtomicU32;

use super::*;
use crate::ntb::layout::MAGIC;

/// A host at one end of a cable, whose rack file says that the other end is at `peer`.
fn link(pair: &Pair, end: usize, rack: &str, host: &str, peer: &str) -> NtbLink {
    let bridges = [(peer.to_owned(), pair.cable.opening(end))];
    NtbLink::new(pair.behind[end].clone(), rack, host, bridges).unwrap()
}

fn wait_for(link: &NtbLink, wanted: impl Fn(&BridgeStatus) -> bool) {
    let begun = Instant::now();
    while !wanted(&link.bridges()[0]) {
        assert!(begun.elapsed() < LIMIT, "{:?}", link.bridges());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_cable_that_leads_to_another_host_or_rack_is_told_and_not_used() {
    let mut pair = Pair::new();
    // In the order of their names gamma is to alpha as beta is, and both are named as alpha is in the other rack.
    for (rack, host) in [("demo", "gamma"), ("other", "beta")] {
        pair.links[1] = None;
        pair.wait_for_end(0, |status| !status.up);
        let wrong = link(&pair, 1, rack, host, "alpha");
        wait_for(&wrong, |status| status.mismatch == Some(PeerMismatch::Names) && !status.up);
        pair.wait_for_end(0, |status| status.mismatch == Some(PeerMismatch::Names) && !status.up);
        let to_beta = Hello { from: "alpha".into(), to: "beta".into(), ..hello(Purpose::Segments) };
        let error = pair.link(0).connect("", &to_beta).err().unwrap().to_string();
        assert!(error.contains("leads to another host or another rack's"), "{error}");
        // It goes without a word, or says so: then nobody is there.
        pair.cable.silent[1].store(host == "gamma", Ordering::Relaxed);
        drop(wrong);
        pair.wait_for_end(0, |status| status.mismatch.is_none());
        pair.cable.silent[1].store(false, Ordering::Relaxed);
        pair.start(1);
        pair.wait_until(|status| status.up && status.mismatch.is_none());
        exchange(&pair.meet(&hello(Purpose::Segments)), b"the right one");
    }
}

#[test]
fn a_node_with_another_version_of_the_link_is_told_of() {
    let mut pair = Pair::new();
    pair.links[1] = None;
    // Of its header no more is known than that it changes.
    let beats = AtomicU32::new(1);
    let beat = || {
        for (at, word) in [(0, MAGIC - 1), (4, beats.fetch_add(1, Ordering::Relaxed))] {
            pair.cable.place(0).arena.whole().store_u32(at, word, Ordering::Release).unwrap();
        }
    };
    let other = PeerMismatch::Version(MAGIC as u8 as u32 - 1);
    let is_told = |status: &BridgeStatus| status.mismatch == Some(other) && !status.up;
    let begun = Instant::now();
    while begun.elapsed() < 2 * SILENCE || !is_told(&pair.status(0)) {
        beat();
        assert!(begun.elapsed() < LIMIT, "{:?}", pair.status(0));
        std::thread::sleep(Duration::from_millis(10));
    }
    pair.wait_for_end(0, |status| status.mismatch.is_none());
    let said = other.to_string();
    assert!(said.contains("version 1 ") && said.contains("version 2:"), "{said}");
}

#[test]
fn a_peer_that_starts_is_not_counted_as_one_that_was_lost() {
    let mut pair = Pair::new();
    let has_asked = |pair: &Pair| pair.cable.cut.iter().all(|cut| !cut.load(Ordering::Relaxed));
    pair.wait_until(|_| has_asked(&pair));
    assert_eq!([0, 1].map(|end| pair.status(end).losses), [0, 0]);
    pair.links[1] = None;
    pair.wait_for_end(0, |status| !status.up);
    pair.start(1);
    pair.wait_until(|status| status.up && has_asked(&pair));
    assert_eq!([0, 1].map(|end| pair.status(end).losses), [1, 0]);
}

#[test]
fn what_ends_the_thread_of_an_ntb_ends_the_link() {
    let pair = Pair::new();
    let streams = pair.meet(&hello(Purpose::Segments));
    let is_to_fail = Arc::new(AtomicBool::new(false));
    let fails = is_to_fail.clone();
    let set = pair.cable.before_store.set(Box::new(move |from, _| {
        assert!(from == 0 || !fails.load(Ordering::Relaxed), "a failure that this test causes");
    }));
    assert!(set.is_ok());
    is_to_fail.store(true, Ordering::Relaxed);
    streams.iter().for_each(|stream| stream.wait_closed());
    pair.wait_until(|status| !status.up);
    pair.wait_for_end(1, |status| status.failed);
    let error = pair.link(1).connect("", &hello(Purpose::Segments)).err().unwrap().to_string();
    assert!(error.contains("has ended its link through the NTB"), "{error}");
    assert!(!pair.status(0).failed);
}

#[test]
fn a_place_is_given_back_where_nobody_takes_the_rest_of_its_conversation() {
    let pair = Pair::new();
    let [theirs, ours] = pair.meet(&hello(Purpose::Segments));
    // More than the sockets and the ring have room for.
    let all = pattern(4 << 20);
    assert_eq!(ours.send(&[&all], &[]), Err(StreamError::TimedOut));
    let ended = Instant::now();
    ours.shut_down();
    drop(ours);
    theirs.wait_closed();
    assert!(ended.elapsed() >= conversation::TIME_LIMIT, "{:?}", ended.elapsed());
    // Each takes the first place that is free: it is the same one again.
    let streams = pair.meet(&hello(Purpose::Segments));
    exchange(&streams, b"again");
    let at = pair.cable.layout.word(1, SlotWord::State) as usize;
    let state = pair.cable.place(0).arena.whole().load_u32(at, Ordering::Acquire).unwrap();
    assert_eq!(state, 2 << 1);
}

/// Whoever goes on listens where the process before did, and opens the NTBs anew.
#[test]
fn ntbs_are_closed_for_a_process_that_goes_on_and_opened_again_where_none_does() {
    let mut pair = Pair::new();
    for is_replaced in [false, true] {
        let listener = pair.link(0).listen("alpha").unwrap();
        let passed = listener.handle().unwrap().as_descriptor().try_clone_to_owned().unwrap();
        drop(listener);
        let ours = NtbConversation::new(pair.link(1).ends["alpha"].begin().unwrap()).unwrap();
        let before = pair.status(1).losses;
        let begun = Instant::now();
        pair.link(0).close_bridges();
        ours.wait_closed();
        pair.wait_for_end(1, |status| !status.up);
        // Long before its silence would tell.
        assert!(begun.elapsed() < SILENCE / 2, "{:?}", begun.elapsed());
        assert_eq!((pair.status(1).losses, pair.status(0).up), (before + 1, false));
        if is_replaced {
            let former = pair.links[0].take();
            pair.start(0);
            drop(former);
        } else {
            pair.link(0).reopen_bridges();
        }
        pair.wait_until(|status| status.up);
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        let listener =
            pair.link(0).listen_on("alpha", ResourceHandle::of_descriptor(passed)).unwrap();
        let hear = std::thread::spawn(move || listener.accept().unwrap().hear().unwrap().accept());
        let address = pair.link(1).locate("alpha").unwrap();
        let ours = pair.link(1).connect(&address, &hello(Purpose::Segments)).unwrap();
        exchange(&[hear.join().unwrap().unwrap(), ours], b"goes on");
    }
}

/// Whoever finds it readable enters a gate, and would wait there for one that does not come.
#[test]
fn nobody_is_announced_when_all_that_came_through_an_ntb_are_taken() {
    let incoming = Incoming::new().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..300 {
            let putting = scope.spawn(|| incoming.put("beta").unwrap());
            while incoming.take().is_none() {}
            let _ours = putting.join().unwrap();
            assert!(!Event::wait_any(&[incoming.event()], Some(0)));
        }
    });
}

#[test]
fn ntbs_that_are_still_being_opened_keep_a_restart_from_going_on_for_a_moment_only() {
    let (opens, wait) = std::sync::mpsc::channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    let folder = tempfile::tempdir().unwrap();
    let bridges = ["beta", "gamma"].map(|peer| -> (String, OpenNtb) {
        let wait = wait.clone();
        let open = move || {
            let _ = wait.lock().unwrap().recv();
            Err(std::io::Error::other("it never opens"))
        };
        (peer.to_owned(), Box::new(open))
    });
    let behind = Arc::new(ShmLink::new("demo", folder.path(), HOSTS));
    let link = NtbLink::new(behind, "demo", "alpha", bridges).unwrap();
    let begun = Instant::now();
    link.close_bridges();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    drop(opens);
}
