//! A port behind an exchange: the same frames in the same order, and what either end may not do.

use std::sync::atomic::Ordering;

use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::{Exchange, SharedMemory};
use rackbus_net::{LocalNetwork, MacAddress, NetworkPort, PortSource, SendOutcome};
use rackbus_pci::{Endpoint, FunctionState, Saved};

use super::super::{CLASS, NicOptions};
use super::*;

mod stored;

const NAME: &str = "alpha/nic0.vf1";

/// A port of a network with its peer, served by a lender to a front.
struct Apart {
    network: LocalNetwork,
    /// `None` while another one takes its place: a port is held by one at a time.
    lender: Option<Endpoint>,
    counters: Arc<NicCounters>,
    description: String,
    front: RemotePort,
    peer: Box<dyn NetworkPort>,
    memory: SharedMemory,
    now: u64,
}

fn function(network: &LocalNetwork, rate: Option<(u64, u64)>, counters: &Arc<NicCounters>) -> Nic {
    let options = NicOptions {
        mac: MacAddress::derived(NAME),
        name: NAME.to_owned(),
        pairs: 1,
        rate,
        packed_rings: true,
    };
    Nic::new(&options, Some(network.port(NAME).unwrap()), counters.clone())
}

impl Apart {
    fn new(rate: Option<(u64, u64)>) -> Apart {
        let network = LocalNetwork::new([]);
        let counters = Arc::<NicCounters>::default();
        let mut lender = Endpoint::new(Box::new(function(&network, rate, &counters)));
        let mut peer = network.port("alpha/nic0.vf2").unwrap();
        peer.attend(true);
        let offer = lender.serve_medium(None).unwrap();
        assert_eq!(offer.class, CLASS);
        assert!(lender.serve_medium(None).is_err(), "another front has it");
        let read: NicDescription = serde_json::from_str(&offer.description).unwrap();
        assert_eq!((read.up, read.rate), (true, rate.map(|(rate, _)| rate)));
        let files = offer.handles.try_into().unwrap();
        let front = RemotePort::join(&read, files, Lost::new(|| {}), Arc::default()).unwrap();
        let memory = SharedMemory::create("frames", 1 << 17).unwrap();
        let description = offer.description;
        let lender = Some(lender);
        Apart { network, lender, counters, description, front, peer, memory, now: 0 }
    }

    fn attended() -> Apart {
        let mut it = Apart::new(None);
        it.front.attend(true);
        it.turn();
        it
    }

    fn turn(&mut self) {
        self.now += 10_000;
        self.lender.as_mut().unwrap().poll(self.now);
    }

    fn send(&mut self, number: u32) -> SendOutcome {
        let frame = frame(&self.memory, (self.front.mac(), self.peer.mac()), number);
        let parts = [frame.part(0, 16).unwrap(), frame.part(16, frame.len() - 16).unwrap()];
        self.front.send(Offload::default(), &parts)
    }

    fn send_back(&mut self, number: u32) -> SendOutcome {
        let frame = frame(&self.memory, (self.peer.mac(), self.front.mac()), number);
        self.peer.send(Offload::default(), &[frame])
    }
}

fn length(number: u32) -> usize {
    18 + (number as usize * 7919) % (MAX_FRAME - 18 - 8)
}

/// A frame with this number, whose length depends on it.
fn frame(memory: &SharedMemory, (from, to): (MacAddress, MacAddress), number: u32) -> DmaSlice<'_> {
    let whole = memory.whole();
    whole.write_obj(0, &to.0);
    whole.write_obj(6, &from.0);
    whole.write_obj(14, &number);
    whole.part(0, length(number)).unwrap()
}

fn number(port: &mut dyn NetworkPort) -> Option<u32> {
    let frame = port.next()?;
    let number: u32 = frame.bytes.read_obj(14).unwrap();
    assert_eq!(frame.bytes.len(), length(number));
    port.consume();
    Some(number)
}

#[test]
fn frames_of_any_length_pass_in_both_directions_in_order() {
    let mut it = Apart::attended();
    let (mut sent, mut came) = ([0; 2], [0; 2]);
    while came[0].min(came[1]) < 2000 {
        if it.send(sent[0]) == SendOutcome::Done {
            sent[0] += 1;
        }
        it.front.flush();
        if it.send_back(sent[1]) == SendOutcome::Done {
            sent[1] += 1;
        }
        it.turn();
        while let Some(next) = number(&mut *it.peer) {
            assert_eq!(next, came[0]);
            came[0] += 1;
        }
        while let Some(next) = number(&mut it.front) {
            assert_eq!(next, came[1]);
            came[1] += 1;
        }
    }
    it.front.flush();
    it.turn();
    assert!(it.front.park() && it.lender.as_mut().unwrap().park(), "there is nothing left to do");
}

/// The front keeps no more than its places hold; what comes then is dropped by who sends it, and counted there.
#[test]
fn a_front_that_takes_nothing_stops_nobody_and_goes_on_in_order() {
    let mut it = Apart::attended();
    let mut sent = 0u32;
    let dropped = loop {
        match it.send_back(sent) {
            SendOutcome::Done => sent += 1,
            SendOutcome::Full => std::thread::sleep(std::time::Duration::from_millis(1)),
            SendOutcome::Dropped(cause) => break cause,
        }
        it.turn();
        assert!(sent < 10_000, "there is room for ever");
    };
    assert_eq!(dropped, rackbus_net::Cause::Full);
    // The other direction continues.
    assert_eq!(it.send(0), SendOutcome::Done);
    it.front.flush();
    it.turn();
    assert_eq!(number(&mut *it.peer), Some(0));
    let mut came = 0;
    for _ in 0..1000 {
        while let Some(next) = number(&mut it.front) {
            assert_eq!(next, came);
            came += 1;
        }
        it.turn();
    }
    assert_eq!(came, sent);
}

#[test]
fn a_port_that_is_not_attended_keeps_no_earlier_frames() {
    let mut it = Apart::attended();
    assert_eq!(it.send_back(1), SendOutcome::Done);
    it.turn();
    it.front.attend(false);
    it.front.attend(true);
    assert_eq!(it.send(1), SendOutcome::Full, "the end of what was before is not answered");
    for _ in 0..4 {
        it.turn();
        assert_eq!(number(&mut it.front), None);
    }
    assert_eq!(it.send(2), SendOutcome::Done);
    assert_eq!(it.send_back(3), SendOutcome::Done);
    it.front.flush();
    it.turn();
    assert_eq!(number(&mut *it.peer), Some(2));
    assert_eq!(number(&mut it.front), Some(3));
}

/// A driver that sends and resets at once: what the port takes at once is sent, and the rest is counted.
#[test]
fn frames_sent_before_a_reset_are_sent_or_counted() {
    for rate in [None, Some((1_000_000, 70_000))] {
        let mut it = Apart::new(rate);
        it.front.attend(true);
        it.turn();
        let sent = (0..20).take_while(|number| it.send(*number) == SendOutcome::Done).count();
        it.front.flush();
        it.front.attend(false);
        it.front.attend(true);
        for _ in 0..4 {
            it.turn();
            assert_eq!(number(&mut it.front), None);
        }
        let came = std::iter::from_fn(|| {
            let came = it.peer.next().is_some();
            it.peer.consume();
            came.then_some(())
        });
        let (came, not_sent) = (came.count(), it.counters.not_sent.load(Ordering::Relaxed));
        assert_eq!(came as u64 + not_sent, sent as u64, "{rate:?}");
        assert!(came > 0 && (rate.is_none() || not_sent > 0), "{came} came, {not_sent} not");
    }
}

#[test]
fn the_lender_keeps_to_the_rate_whatever_the_front_does() {
    // A burst of one of the longest frames, and 1 MB/s.
    let mut it = Apart::new(Some((1_000_000, 70_000)));
    it.front.attend(true);
    it.turn();
    let (mut passed, begun) = (0, it.now);
    let mut number = 0;
    while it.now < begun + 1_000_000_000 {
        while it.send(number) == SendOutcome::Done {
            number += 1;
        }
        it.front.flush();
        it.now += 1_000_000;
        it.turn();
        while let Some(frame) = it.peer.next() {
            passed += frame.bytes.len();
            it.peer.consume();
        }
    }
    assert!((900_000..1_200_000).contains(&passed), "{passed} bytes in a second");
    assert!(it.counters.throttled.load(Ordering::Relaxed) > 0);
}

/// A driver that begins anew then gets nothing of before, although the function was just saved.
#[test]
fn a_front_that_was_saved_and_taken_back_tells_its_lender_who_attends() {
    let mut it = Apart::attended();
    assert_eq!(it.send_back(1), SendOutcome::Done);
    it.turn();
    drop(it.front.save().unwrap());
    it.front.take_back();
    it.front.attend(false);
    it.front.attend(true);
    for _ in 0..4 {
        it.turn();
        assert_eq!(number(&mut it.front), None, "a frame of before");
    }
    assert_eq!(it.send_back(2), SendOutcome::Done);
    it.turn();
    assert_eq!(number(&mut it.front), Some(2));
    // The lender's end likewise.
    let saved = it.lender.as_mut().unwrap().save().unwrap();
    it.lender.as_mut().unwrap().take_back(saved).unwrap();
    it.lender.as_mut().unwrap().scrub();
    assert!(!it.front.is_up(), "it does not hear that it has the port no more");
}

/// Both ends are saved and go on elsewhere, in the middle of what is under way.
#[test]
fn both_ends_go_on_elsewhere_without_losing_a_batch() {
    let mut it = Apart::attended();
    for number in 0..40 {
        assert_eq!(it.send(number), SendOutcome::Done);
        if number < 10 {
            assert_eq!(it.send_back(number), SendOutcome::Done);
            it.turn();
        }
    }
    assert_eq!(number(&mut it.front), Some(0));
    it.front.flush();
    it.turn();
    let (state, files) = it.front.save().unwrap();
    it.front.attend(false);
    let read: NicDescription = serde_json::from_str(&it.description).unwrap();
    let end = InheritedEnd { files, session: None };
    let again = RemotePort::again(&read, end, Lost::new(|| {}), Arc::default()).unwrap();
    it.front = again;
    assert_eq!(number(&mut it.front), None, "it is not told yet");
    it.front.restore(&state).unwrap();

    let Saved { state, descriptors, medium } = it.lender.as_mut().unwrap().save().unwrap();
    it.lender = None;
    let mut nic = function(&it.network, None, &it.counters);
    nic.inherited.files = medium;
    let mut lender = Endpoint::new(Box::new(nic));
    let state = FunctionState::from_bytes(&state.to_bytes().unwrap()).unwrap();
    lender.restore(&state, descriptors).unwrap();
    it.lender = Some(lender);

    let (mut there, mut here) = (0, 1);
    for _ in 0..200 {
        // First, so that there is room: a frame is given up whose receiver's ring was full for some milliseconds.
        while let Some(next) = number(&mut *it.peer) {
            assert_eq!(next, there);
            there += 1;
        }
        while let Some(next) = number(&mut it.front) {
            assert_eq!(next, here);
            here += 1;
        }
        it.front.flush();
        it.turn();
    }
    assert_eq!((there, here), (40, 10));
}

/// A batch of one frame of 60 bytes whose record says this.
fn record(length: u32, offload: Offload) -> Vec<u8> {
    let record = Record { length: length.into(), offload, spare: [0; 2] };
    [record.as_bytes(), &[2; 60]].concat()
}

#[test]
fn a_front_that_breaks_the_rules_is_disconnected_and_its_lender_goes_on() {
    let ask = |slot: u16, kind: u8, bytes: u32| {
        Ask { slot: slot.into(), kind, flag: 1, bytes: bytes.into() }.as_bytes().to_vec()
    };
    let unsound = Offload { gso_type: 9, ..Offload::default() };
    let batch = ask(0, kind::SEND, 76);
    let attend = ask(ATTEND, kind::ATTEND, 0);
    let none = Vec::new;
    let cases: [(Vec<Vec<u8>>, Vec<u8>); 13] = [
        (vec![vec![]], none()),
        (vec![vec![1; MESSAGE_BYTES]], none()),
        (vec![ask(0, 9, 0)], none()),
        (vec![ask(BATCHES, kind::SEND, 76)], none()),
        (vec![ask(0, kind::ROOM, 0)], none()),
        (vec![ask(WATCH, kind::ATTEND, 0)], none()),
        (vec![ask(0, kind::SEND, u32::MAX)], none()),
        (vec![ask(BATCHES, kind::ROOM, 0), ask(BATCHES, kind::ROOM, 0)], none()),
        (vec![ask(WATCH, kind::WATCH, 0), ask(WATCH, kind::WATCH, 0)], none()),
        (vec![attend.clone(), batch.clone()], record(u32::MAX, Offload::default())),
        (vec![attend.clone(), batch.clone()], record(61, Offload::default())),
        (vec![attend.clone(), batch.clone()], record(3, Offload::default())),
        (vec![attend, batch], record(60, unsound)),
    ];
    for (nth, (messages, data)) in cases.into_iter().enumerate() {
        let network = LocalNetwork::new([]);
        let counters = Arc::default();
        let mut lender = Endpoint::new(Box::new(function(&network, None, &counters)));
        let handles = lender.serve_medium(None).unwrap().handles;
        let mut front = Exchange::join(handles.try_into().unwrap(), LAYOUT).unwrap();
        front.data(0, data.len()).unwrap().get().copy_from(&data);
        for message in messages {
            front.send(&message, None).unwrap();
        }
        front.ring();
        for now in 1..4 {
            lender.poll(now);
        }
        assert!(front.is_closed(), "case {nth}");
        lender.scrub();
        assert!(lender.serve_medium(None).is_ok(), "case {nth}: the next front");
    }
}

#[test]
fn a_lender_that_breaks_the_rules_is_lost_to_its_front() {
    let answer = |slot: u16, bytes: u32, number: u32| Answer {
        slot: slot.into(),
        up: 1,
        generation: 0,
        bytes: bytes.into(),
        number: number.into(),
    };
    let first = BATCHES;
    let cases = [
        (vec![answer(0, 0, 0)], Vec::new()),
        (vec![answer(WATCH + 1, 0, 0)], Vec::new()),
        (vec![answer(ATTEND, 0, 0), answer(ATTEND, 0, 0)], Vec::new()),
        (vec![answer(first, 0, 0)], Vec::new()),
        (vec![answer(first, u32::MAX, 0)], Vec::new()),
        (vec![answer(first, 76, 31)], Vec::new()),
        (vec![answer(first, 76, 1), answer(first + 1, 76, 1)], Vec::new()),
        (vec![answer(first, 76, 0)], record(77, Offload::default())),
    ];
    let description = NicDescription {
        serial: 1,
        mac: [2; 6],
        mtu: 1500,
        pairs: 1,
        rate: None,
        up: true,
        split_rings: false,
    };
    for (nth, (answers, data)) in cases.into_iter().enumerate() {
        let (mut lender, files) = Exchange::create("hostile", LAYOUT).unwrap();
        let lost = Lost::new(|| {});
        let mut front = RemotePort::join(&description, files, lost, Arc::default()).unwrap();
        front.attend(true);
        lender.data(first.into(), data.len()).unwrap().get().copy_from(&data);
        for answer in &answers {
            lender.send(answer.as_bytes(), None).unwrap();
        }
        lender.ring();
        assert!(front.next().is_none(), "case {nth}");
        assert!(!front.is_up() && lender.is_closed(), "case {nth}");
        assert!(front.park(), "case {nth}: nothing comes any more");
    }
}

/// Its data may have come beside the link, after the driver has reset the function and begun anew.
#[test]
fn a_batch_from_before_a_reset_does_not_count_for_one_after_it() {
    let description = NicDescription {
        serial: 1,
        mac: [2; 6],
        mtu: 1500,
        pairs: 1,
        rate: None,
        up: true,
        split_rings: false,
    };
    let (mut lender, files) = Exchange::create("late", LAYOUT).unwrap();
    let mut front =
        RemotePort::join(&description, files, Lost::new(|| {}), Arc::default()).unwrap();
    // The generation of each time that frames are, or are not, taken, as it is said and answered.
    let attend = |front: &mut RemotePort, lender: &mut Exchange, on| {
        front.attend(on);
        let (mut message, mut said) = ([0; MESSAGE_BYTES], None);
        while let Some(length) = lender.receive(&mut message) {
            let ask = Ask::read_from_bytes(&message[..length]).unwrap();
            if ask.kind == kind::ATTEND {
                said = Some((ask.flag != 0, ask.bytes.get() as u8));
                let answer = Answer { slot: ATTEND.into(), up: 1, ..Answer::default() };
                lender.send(answer.as_bytes(), None).unwrap();
            }
        }
        lender.ring();
        assert!(front.next().is_none());
        said.unwrap()
    };
    let before = attend(&mut front, &mut lender, true);
    let off = attend(&mut front, &mut lender, false);
    let after = attend(&mut front, &mut lender, true);
    assert_eq!([before, off, after], [(true, 1), (false, 2), (true, 3)]);
    let mut send = |slot: u16, number: u32, generation: u8| {
        let place = lender.data(slot.into(), LAYOUT.data_bytes).unwrap();
        let mut filling = Filling::new(slot, place);
        let memory = SharedMemory::create("frame", 4096).unwrap();
        filling.put(Offload::default(), 60, &[memory.whole().part(0, 60).unwrap()]);
        let (bytes, number) = ((filling.bytes as u32).into(), number.into());
        let answer = Answer { slot: slot.into(), up: 1, generation, bytes, number };
        lender.send(answer.as_bytes(), Some((slot.into(), filling.bytes))).unwrap();
        lender.ring();
    };
    send(BATCHES, 0, before.1);
    assert!(front.next().is_none(), "of before the reset");
    send(BATCHES + 1, 1, after.1);
    assert!(front.next().is_some());
    front.consume();
    // A lender of the version before does not say.
    send(BATCHES + 2, 2, 0);
    assert!(front.next().is_some());
}
