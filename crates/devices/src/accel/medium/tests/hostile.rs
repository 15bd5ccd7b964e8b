//! Either end says what it must not: the other one refuses it, and nothing is touched.

use proptest::prelude::*;

use super::*;

/// The other side of a medium, by hand.
fn by_hand() -> (Endpoint, Exchange) {
    let mut lender = lender(&pool());
    let offer = lender.serve_medium(None).unwrap();
    let busy = lender.serve_medium(None);
    assert!(matches!(busy, Err(MediumRefused::InUse)));
    (lender, Exchange::join(offer.handles.try_into().unwrap(), LAYOUT).unwrap())
}

#[test]
fn a_front_that_breaks_the_rules_is_not_listened_to_any_more() {
    let run = |slot: u16| Ask {
        slot: slot.into(),
        kind: kind::RUN,
        stages: [Operation::Deflate as u8, 0, 0, 0],
        input_length: (1 << 20).into(),
        output_length: (1 << 20).into(),
        ..Ask::default()
    };
    let good = run(1);
    let bytes = |ask: Ask| ask.as_bytes().to_vec();
    let wrong = [
        ("a message of another length", vec![bytes(good)[1..].to_vec()]),
        ("a slot that is none", vec![bytes(run(SLOTS))]),
        ("a slot twice", vec![bytes(good), bytes(good)]),
        ("a queue that is none", vec![bytes(Ask { queue: 8, ..good })]),
        (
            "more than there is room for",
            vec![bytes(Ask { input_length: (1 << 21).into(), ..good })],
        ),
        ("a stop of one slot", vec![bytes(Ask { kind: kind::STOP, ..good })]),
        ("a kind that is none", vec![bytes(Ask { kind: 3, ..good })]),
    ];
    for (what, messages) in wrong {
        let (mut lender, mut front) = by_hand();
        for message in messages {
            front.send(&message, None).unwrap();
        }
        front.ring();
        lender.poll(0);
        assert!(front.is_closed(), "{what}");
    }
    // What a tenant may get wrong is an error of its own operation.
    let (mut lender, mut front) = by_hand();
    let descriptor = Ask {
        stages: [Operation::Wait as u8, 0, 0, 0],
        input_length: 4.into(),
        associated: 1.into(),
        output_length: 0.into(),
        ..good
    };
    front.send(descriptor.as_bytes(), None).unwrap();
    lender.poll(0);
    let mut message = [0; rackbus_memory::exchange::MESSAGE_BYTES];
    let length = front.receive(&mut message).unwrap();
    let answer = Answer::read_from_bytes(&message[..length]).unwrap();
    assert_eq!(answer.status.get(), OperationStatus::InvalidOperation as u16);
}

/// Patterns may take long to compile, and who takes the function back waits no longer than for one.
#[test]
fn of_many_contexts_that_are_asked_for_a_poll_makes_one() {
    let (mut lender, mut front) = by_hand();
    for slot in 0..32 {
        front.data(input_tag(slot), 32).unwrap().get().fill(5);
        let asked = Ask {
            slot: slot.into(),
            kind: kind::RUN,
            queue: slot as u8 % 8,
            stages: [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0],
            input_length: 32.into(),
            ..Ask::default()
        };
        front.send(asked.as_bytes(), Some((input_tag(slot), 32))).unwrap();
    }
    front.ring();
    let (mut message, mut answered) = ([0; rackbus_memory::exchange::MESSAGE_BYTES], 0);
    let begun = Instant::now();
    while answered < 32 {
        let now = lender.clock();
        lender.poll(now);
        let came = std::iter::from_fn(|| front.receive(&mut message)).count();
        assert!(came <= 1, "{came} at once");
        answered += came;
        assert!(begun.elapsed() < Duration::from_secs(20), "{answered} answers");
    }
}

#[test]
fn a_lender_that_breaks_the_rules_is_lost() {
    let answer = |slot: u16, status: u16, written: u32| Answer {
        slot: slot.into(),
        status: status.into(),
        written: written.into(),
        value: 0.into(),
    };
    for (what, message) in [
        ("an answer to nothing", answer(5, 0, 0)),
        ("an answer of no slot", answer(64, 0, 0)),
        ("a stop that nobody asked for", answer(STOP, 0, 0)),
        ("a status that is none", answer(0, 99, 0)),
        ("more than there is room for", answer(0, 0, 65)),
    ] {
        let (mut lender, files) = Exchange::create("by hand", LAYOUT).unwrap();
        let description =
            serde_json::to_string(&AcceleratorDescription { serial: 1, operations: u64::MAX });
        let (description, lost) = (description.unwrap(), Lost::new(|| {}));
        let made = front(&description, MediumAccess::Handles(files.into()), lost.clone()).unwrap();
        let mut tenant = Tenant::with(Endpoint::new(made), None, lost, None, description);
        tenant.put(OUTPUT, &[7; 100]);
        let asked =
            Descriptor { input_length: 64, output_length: 64, ..ask(&[Operation::Copy], &[]) };
        tenant.push(&asked);
        tenant.poll_front();
        lender.data(output_tag(0), 4096).unwrap().get().fill(1);
        lender.send(message.as_bytes(), Some((output_tag(0), 4096))).unwrap();
        lender.ring();
        assert_eq!(tenant.wait().0, OperationStatus::Unreachable, "{what}");
        assert_eq!(tenant.get(OUTPUT, 100), [7; 100], "{what}");
        assert!(lender.is_closed() && tenant.lost.get(), "{what}");
    }
}

/// Invariant I4 under way: what was unmapped is not written to by an answer that comes later.
#[test]
fn an_answer_after_its_memory_was_unmapped_touches_nothing() {
    let mut tenant = Tenant::apart(&pool());
    tenant.put(INPUT, &message(64));
    tenant.put(OUTPUT, &[7; 64]);
    tenant.push(&Descriptor { input_length: 64, ..ask(&[Operation::Copy], &[]) });
    tenant.poll_front();
    tenant.front.unmap(IOVA, MEMORY).unwrap();
    tenant.poll_lender();
    tenant.poll_front();
    assert_eq!(tenant.get(OUTPUT, 64), [7; 64]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a front says, and whatever is in the places for data, its lender goes on for the next one.
    #[test]
    fn a_lender_outlives_any_front(
        messages in prop::collection::vec((any::<[u8; 44]>(), 0..3u8, 0..70u16, 0..18u8), 1..60),
        data in prop::collection::vec(any::<u8>(), 1..5000),
    ) {
        let (mut lender, mut front) = by_hand();
        for (noise, kind, slot, stage) in messages {
            let mut ask = Ask::read_from_bytes(&noise).unwrap();
            (ask.kind, ask.slot, ask.stages) = (kind.max(1), slot.into(), [stage, 0, 0, 0]);
            ask.queue %= 8;
            ask.contexts = [1.into(), 0.into(), 0.into(), 0.into()];
            let length = data.len() as u32;
            (ask.input_length, ask.associated) = (length.into(), (ask.associated.get() % 20).into());
            ask.output_length = (ask.output_length.get() % (1 << 20)).into();
            if let Some(place) = front.data(input_tag(slot % SLOTS), data.len()) {
                place.get().copy_from(&data);
            }
            let _ = front.send(ask.as_bytes(), None);
            lender.poll(0);
        }
        lender.scrub();
        prop_assert!(lender.serve_medium(None).is_ok());
    }
}
