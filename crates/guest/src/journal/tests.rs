//! A standby that takes the same records knows the same, from whichever moment on.

use proptest::prelude::*;
use rackbus_segment::Handle;
use rackbus_segment::message::{Connected, Reply, decode, encode};

use super::*;

const WINDOW: u64 = 64 << 20;
const CONTROL: u64 = 2;

fn words(fields: &[u64]) -> Vec<u8> {
    fields.iter().flat_map(|field| field.to_le_bytes()).collect()
}

/// A request of the guest's kernel.
fn ask(code: u32, node: u64, arguments: &[u8], head: u16) -> JournalRecord {
    let mut bytes = ((40 + arguments.len()) as u32).to_le_bytes().to_vec();
    bytes.extend(code.to_le_bytes());
    bytes.extend(words(&[u64::from(head), node]));
    [1000_u32, 100, 1, 0].iter().for_each(|field| bytes.extend(field.to_le_bytes()));
    bytes.extend(arguments);
    JournalRecord::Request { now: 0, queue: 1, head, room: vec![(0x1000, 4096)], bytes }
}

fn said(session: u64) -> JournalRecord {
    let connection = Handle(1);
    let connected = Connected { connection, size: 1, write: true, address: None };
    let message = encode(&Reply::Connected(connected));
    // Of two, one is let go when they have ended.
    let kinds = vec![DescriptorKind::Memory { size: 40 << 20, write: true }, DescriptorKind::Bell];
    JournalRecord::Received { session, events: false, message, kinds, lost: false }
}

/// Something that may happen, by three numbers.
fn record((what, which, where_): (u8, u64, u64)) -> JournalRecord {
    let (session, node) = (17 + which % 4, 16 + where_ % 8);
    let head = (where_ % 8) as u16;
    let page = DescriptorKind::Memory { size: 4096, write: true };
    let read = |at: u64| {
        let mut arguments = words(&[session, at << 16]);
        arguments.extend((64_u32 << 10).to_le_bytes());
        arguments
    };
    match what {
        0 => ask(14, CONTROL, &words(&[0]), head),
        1 => JournalRecord::Connected { session, page },
        2 => JournalRecord::Unreachable { session },
        3 => said(session),
        4 => ask(15, CONTROL, &read(which % 2), head),
        5 => ask(48, node, &words(&[0, 0, 2 << 20, 1, (which % 16) << 21]), head),
        6 => JournalRecord::Mapped { job: which, done: where_ % 2 == 0 },
        7 => JournalRecord::Unmapped,
        8 => ask(18, CONTROL, &words(&[session, 0, 0]), head),
        9 => ask(2, node, &words(&[1]), head),
        10 => JournalRecord::Over { session },
        11 => JournalRecord::Rang { object: node },
        12 => JournalRecord::Tick { now: which * 100 },
        13 => ask(14, node, &words(&[0]), head),
        14 => JournalRecord::Stop,
        15 => JournalRecord::Clear,
        _ => JournalRecord::Frontend { message: words(&[which, where_]) },
    }
}

proptest! {
    #[test]
    fn a_standby_decides_as_the_serving_process_does(
        events in prop::collection::vec((0_u8..17, 0_u64..40, 0_u64..40), 1..120),
        from in 0_usize..120,
    ) {
        let mut serving = Core::new(WINDOW);
        let mut standby = None;
        for (at, event) in events.into_iter().enumerate() {
            if at == from.min(119) {
                standby = Some(decode::<Core>(&encode(&serving)).unwrap());
            }
            let event = record(event);
            let outcome = serving.take(&event);
            if let Some(standby) = &mut standby {
                prop_assert_eq!(standby.take(&event), outcome);
                prop_assert_eq!(encode(standby), encode(&serving));
            }
        }
    }

    /// Each request that was taken from a queue is in the core, with its answer or as one that is waited
    /// for, until another one takes its place or the queues stop.
    #[test]
    fn no_request_is_forgotten(events in prop::collection::vec((0_u8..14, 0_u64..40, 0_u64..40), 1..120)) {
        let mut core = Core::new(WINDOW);
        let mut open: BTreeMap<u16, (u64, Option<Vec<u8>>)> = BTreeMap::new();
        for event in events {
            let event = record(event);
            if let JournalRecord::Request { head, .. } = &event {
                open.insert(*head, (core.next_token(), None));
            }
            for action in core.take(&event).actions {
                if let GuestAction::Answer { token, bytes } = action
                    && let Some((_, answer)) = open.values_mut().find(|(other, _)| *other == token)
                {
                    prop_assert!(answer.is_none(), "answered twice");
                    *answer = Some(bytes);
                }
            }
            let known: BTreeMap<u16, (u64, Option<Vec<u8>>)> = core
                .requests(1)
                .map(|(token, request)| (request.head, (token, request.answer.clone())))
                .collect();
            prop_assert_eq!(&known, &open);
        }
    }
}

/// What QEMU says of where a queue continues.
fn base(queue: u32, at: u32) -> JournalRecord {
    let message = [10, 1, 8, queue, at].into_iter().flat_map(u32::to_le_bytes).collect();
    JournalRecord::Frontend { message }
}

#[test]
fn a_vm_that_goes_on_gets_its_answers_and_one_that_was_reset_none() {
    let mut core = Core::new(WINDOW);
    core.take(&base(1, 0));
    core.take(&ask(14, CONTROL, &words(&[0]), 3));
    assert_eq!(core.requests(1).count(), 1);
    core.take(&base(1, 1));
    core.take(&base(0, 5));
    assert_eq!(core.requests(1).count(), 1);
    core.take(&base(1, 0));
    assert_eq!(core.requests(1).count(), 0);
}

/// A ring's index has 16 bits, and is 0 again after so many requests.
#[test]
fn a_vm_whose_ring_has_gone_round_goes_on_and_gets_its_answers() {
    let mut core = Core::new(WINDOW);
    core.take(&base(0, 0));
    core.take(&base(1, 0));
    let forget =
        JournalRecord::Request { now: 0, queue: 0, head: 0, room: Vec::new(), bytes: Vec::new() };
    core.take(&forget);
    let nothing = ask(20, CONTROL, &[], 1);
    (0..u16::MAX).for_each(|_| drop(core.take(&nothing)));
    core.take(&ask(14, CONTROL, &words(&[0]), 3));
    let waits = |core: &Core| core.requests(1).filter(|(_, it)| it.answer.is_none()).count();
    assert_eq!((core.next, waits(&core)), ([1, 0], 1));
    for queue in 0..2 {
        assert_eq!(core.take(&base(queue, 1 - queue)).actions, []);
    }
    assert_eq!((waits(&core), core.state.counts()[0]), (1, 1));
    // It is reset, which only the other queue tells.
    core.take(&base(0, 0));
    core.take(&base(1, 0));
    assert_eq!((core.requests(1).count(), core.state.counts()[0]), (0, 0));
}

/// The guest of a VM that was reset may never mount the file system again.
#[test]
fn sessions_end_when_a_vm_that_was_reset_starts_its_queues() {
    let mut core = Core::new(WINDOW);
    let page = DescriptorKind::Memory { size: 4096, write: true };
    core.take(&base(0, 0));
    core.take(&base(1, 0));
    core.take(&ask(14, CONTROL, &words(&[0]), 3));
    core.take(&JournalRecord::Connected { session: 17, page });
    // It was stopped and goes on.
    for queue in 0..2 {
        assert_eq!(core.take(&base(queue, queue)).actions, []);
    }
    assert_eq!(core.state.counts()[0], 1);
    core.take(&base(0, 0));
    let ended = core.take(&base(1, 0)).actions;
    assert!(ended.contains(&GuestAction::End { session: 17 }), "{ended:?}");
    assert_eq!(core.state.counts(), [0; 3]);
}

#[test]
fn what_qemu_has_not_done_is_known_in_its_order() {
    let mut core = Core::new(WINDOW);
    core.take(&ask(14, CONTROL, &words(&[0]), 0));
    let page = DescriptorKind::Memory { size: 4096, write: true };
    let outcome = core.take(&JournalRecord::Connected { session: 17, page });
    let page = outcome.objects[0];
    for (head, at) in [(1, 0), (2, 2 << 20)] {
        core.take(&ask(48, page, &words(&[0, 0, 2 << 20, 1, at]), head));
    }
    let places = |core: &Core| -> Vec<u64> {
        let at = |job: &QemuJob| match job {
            QemuJob::Map { at, .. } => *at,
            QemuJob::Unmap { .. } => u64::MAX,
        };
        core.jobs().map(at).collect()
    };
    assert_eq!(places(&core), [0, 2 << 20]);
    core.take(&JournalRecord::Mapped { job: 1, done: true });
    assert_eq!(places(&core), [2 << 20]);
    core.take(&JournalRecord::Clear);
    assert_eq!(places(&core), [2 << 20, u64::MAX]);
}

#[test]
fn steps_that_may_not_have_been_taken_are_told() {
    let mut core = Core::new(WINDOW);
    core.take(&ask(14, CONTROL, &words(&[0]), 0));
    core.take(&JournalRecord::Connected {
        session: 17,
        page: DescriptorKind::Memory { size: 4096, write: true },
    });
    let before = core.records();
    let mut write = words(&[17, 0]);
    write.extend([5_u32, 0, 0, 0, 0, 0].iter().flat_map(|field| field.to_le_bytes()));
    write.extend(b"hello");
    core.take(&ask(16, CONTROL, &write, 1));
    assert_eq!(core.steps_after(before).collect::<Vec<_>>(), [JournalStep::Sent(17)]);
    assert_eq!(core.steps_after(core.records()).count(), 0);
}
