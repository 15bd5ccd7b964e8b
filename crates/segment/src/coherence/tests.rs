//! One end alone: what it makes of messages, and what it refuses.

use proptest::prelude::*;

use super::*;

const SIZE: u64 = 2 * PAGE as u64 + 99;

fn home(write: bool) -> ConnectionWindow {
    ConnectionWindow::new(ConnectionSide::Home, SIZE, write)
}

fn pages(memory: &[u8]) -> Vec<(u64, &[u8])> {
    memory.chunks(PAGE).enumerate().map(|(page, bytes)| (page as u64, bytes)).collect()
}

proptest! {
    #[test]
    fn exactly_what_was_stored_is_sent_however_it_is_cut(
        stores in prop::collection::vec((0..SIZE as usize, any::<u8>()), 0..60),
        most in 0_usize..200,
    ) {
        let mut memory = vec![0; SIZE as usize];
        let mut here = home(true);
        let mut there = ConnectionWindow::new(ConnectionSide::Replica, SIZE, true);
        let mut replica = vec![0; SIZE as usize];
        for half in [&stores[..stores.len() / 2], &stores[stores.len() / 2..]] {
            let before = memory.clone();
            half.iter().for_each(|(at, value)| memory[*at] = *value);
            let differ = (0..memory.len()).filter(|at| memory[*at] != before[*at]).count();
            let batch = here.collect(pages(&memory)).unwrap();
            prop_assert_eq!(batch.stores().bytes(), differ);
            prop_assert!(here.collect(pages(&memory)).is_none(), "one is under way");
            let parts = batch.parts(most);
            for (nth, part) in parts.iter().enumerate() {
                prop_assert_eq!(part.last, nth + 1 == parts.len());
                let whole = there.hear(part.batch, part.last, &part.places, part.data).unwrap();
                prop_assert_eq!(whole, part.last);
                let taken = there.take_effect().map(|(_, stores)| stores);
                prop_assert_eq!(taken.is_some(), part.last);
                for (at, bytes) in taken.iter().flat_map(Stores::iter) {
                    replica[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                }
            }
            prop_assert_eq!(&replica, &memory);
            let used = pages(&memory).into_iter().filter(|(_, bytes)| bytes.iter().any(|it| *it != 0));
            prop_assert!(here.known_pages(0..u64::MAX).eq(used.map(|(page, _)| page)));
            prop_assert!(here.each_known(1..9).eq((1..9).map(|page| (page, here.known(page)))));
            here.applied(batch.number()).unwrap();
        }
    }

    /// However a copy lies beside stores, and where the other side's own stores are under way in it.
    #[test]
    fn what_was_copied_is_sent_once_with_what_was_stored_beside_it(
        stores in prop::collection::vec((0..SIZE as usize, any::<u8>()), 0..60),
        own in prop::collection::vec((0..SIZE as usize, any::<u8>()), 0..9),
        (offset, length) in (0..SIZE as usize, 0..SIZE as usize),
        (most, value) in (1_usize..2000, any::<u8>()),
    ) {
        let (mut memory, mut replica) = (vec![0; SIZE as usize], vec![0; SIZE as usize]);
        let mut here = home(true);
        let mut there = ConnectionWindow::new(ConnectionSide::Replica, SIZE, true);
        own.iter().for_each(|(at, value)| replica[*at] = *value);
        let kept: Vec<usize> = (0..SIZE as usize).filter(|at| replica[*at] != 0).collect();
        there.collect(pages(&replica)).unwrap();
        stores.iter().for_each(|(at, value)| memory[*at] = *value);
        let copied = offset..SIZE.min((offset + length) as u64) as usize;
        // What was stored to the range is told as it was copied.
        let batch = here.collect_with(pages(&memory), (offset as u64, vec![value; copied.len()]));
        let batch = batch.unwrap();
        memory[copied.clone()].fill(value);
        prop_assert!(here.collect(pages(&memory)).is_none(), "one is under way");
        let mut parts = 0;
        for part in batch.parts(most) {
            let whole = there.hear(part.batch, part.last, &part.places, part.data).unwrap();
            parts += usize::from(whole);
        }
        for part in batch.copied_parts(most) {
            let whole = there.hear_copied(part.batch, part.last, part.offset, part.data).unwrap();
            parts += usize::from(whole);
        }
        prop_assert_eq!(parts, 1);
        prop_assert_eq!(there.has_copied(), !copied.is_empty());
        let mut changed = vec![false; SIZE as usize];
        let (_, taken) = there.take_effect().unwrap();
        for (at, bytes) in taken.iter() {
            let range = at as usize..at as usize + bytes.len();
            prop_assert!(!changed[range.clone()].contains(&true), "twice");
            changed[range.clone()].fill(true);
            replica[range].copy_from_slice(bytes);
        }
        prop_assert!(kept.iter().all(|at| !changed[*at]), "it is to be stored at the home later");
        prop_assert!((0..SIZE as usize).all(|at| kept.contains(&at) || replica[at] == memory[at]));
        here.applied(batch.number()).unwrap();
        prop_assert!(here.collect(pages(&memory)).unwrap().stores().is_empty());
    }

    #[test]
    fn whatever_a_peer_says_it_stays_inside(
        said in prop::collection::vec(
            (0_u64..4, any::<bool>(), prop::collection::vec((0_u64..SIZE + 9, 0_u32..40), 0..4), 0_usize..90),
            0..20,
        ),
    ) {
        let mut window = home(true);
        for (batch, last, places, length) in said {
            let heard = match places[..] {
                [(offset, _)] => window.hear_copied(batch, last, offset, vec![7; length]),
                _ => window.hear(batch, last, &places, &vec![7; length]),
            };
            let taken = window.take_effect().map(|(_, stores)| stores);
            for (at, bytes) in taken.iter().flat_map(Stores::iter) {
                prop_assert!(at + bytes.len() as u64 <= SIZE);
            }
            prop_assert!(window.arriving.stores.bytes() as u64 <= SIZE);
            prop_assert!(window.arriving.copied.bytes() as u64 <= SIZE);
            if heard.is_err() {
                return Ok(());
            }
        }
    }
}

#[test]
fn what_goes_on_with_a_copy_waits_for_nothing_and_takes_effect_in_its_order() {
    let mut here = ConnectionWindow::new(ConnectionSide::Replica, SIZE, true);
    let mut there = home(true);
    let first = here.collect_with([], (0, vec![1; 9])).unwrap();
    let mut sent = vec![first];
    while let Some(batch) = here.go_on_with((9 * sent.len() as u64, vec![1; 9])) {
        sent.push(batch);
    }
    assert_eq!(sent.len(), MOST_UNDER_WAY);
    assert!(here.collect([]).is_none() && !here.has_applied(1), "a snapshot waits for all");
    for batch in &sent {
        let (offset, bytes) = batch.copied().unwrap();
        assert_eq!(there.hear_copied(batch.number(), true, offset, bytes), Ok(true));
    }
    let next = sent.len() as u64 + 1;
    assert_eq!(there.hear_copied(next, true, 0, vec![1]), Err(Violation::Number(next)), "too many");
    // What the home says of a time before it has the last one is not for its bytes, whatever was answered meanwhile.
    assert_eq!(here.hear(1, true, &[(8, 2)], &[7, 8]), Ok(true));
    for (nth, batch) in sent.iter().enumerate() {
        let (number, stores) = there.take_effect().unwrap();
        assert_eq!((number, stores.iter().next().unwrap().0), (batch.number(), 9 * nth as u64));
        assert_eq!(there.hear(next, true, &[(0, 1)], &[1]).is_err(), nth + 1 < sent.len());
        assert_eq!(here.applied(number + 1), Err(Violation::Number(number + 1)));
        here.applied(number).unwrap();
        assert!(here.has_applied(number));
        assert_eq!(here.has_applied(number + 1), number == next - 1);
    }
    assert_eq!(here.take_effect().unwrap().1, Stores::default());
    assert!(here.collect([]).is_some());
}

#[test]
fn malformed_messages_are_refused() {
    type Case = (u64, &'static [(u64, u32)], &'static [u8], Violation);
    let cases: [Case; 7] = [
        (2, &[], &[], Violation::Number(2)),
        (0, &[], &[], Violation::Number(0)),
        (1, &[(SIZE, 1)], &[1], Violation::Place),
        (1, &[(u64::MAX, 2)], &[1, 2], Violation::Place),
        (1, &[(5, 2), (6, 1)], &[1, 2, 3], Violation::Place),
        (1, &[(5, 2)], &[1], Violation::Length),
        (1, &[(5, 2)], &[1, 2, 3], Violation::Length),
    ];
    for (batch, places, data, violation) in cases {
        assert_eq!(home(true).hear(batch, true, places, data), Err(violation), "{places:?}");
    }
    assert_eq!(home(false).hear(1, true, &[(0, 1)], &[1]), Err(Violation::ReadOnly));
    for (batch, offset, length, violation) in [
        (2, 5, 1, Violation::Number(2)),
        (1, SIZE, 1, Violation::Place),
        (1, u64::MAX, 2, Violation::Place),
        (1, 3, 1, Violation::Place),
        (1, 5, 1, Violation::Place),
        (1, 4, 0, Violation::Place),
    ] {
        let mut window = home(true);
        assert_eq!(window.hear_copied(1, false, 2, &[1, 2]), Ok(false));
        assert_eq!(window.hear_copied(batch, true, offset, vec![1; length]), Err(violation));
    }
    assert_eq!(home(false).hear_copied(1, true, 0, &[1]), Err(Violation::ReadOnly));
    let mut window = home(true);
    assert_eq!(window.hear(1, false, &[(8, 2)], &[1, 2]), Ok(false));
    assert_eq!(window.hear_copied(1, true, 9, &[1]), Err(Violation::Place), "stored, too");
    assert_eq!(window.hear_copied(1, false, 10, &[1]), Ok(false));
    assert_eq!(window.hear(1, true, &[(20, 1)], &[1]), Err(Violation::Place), "comes too late");
    assert_eq!(home(true).applied(1), Err(Violation::Number(1)));
    assert!(
        ConnectionWindow::new(ConnectionSide::Replica, SIZE, false).collect([]).is_none(),
        "it only loads"
    );
}

#[test]
fn what_was_copied_is_cut_into_as_few_parts_as_fit_of_about_the_same_length() {
    let (size, most) = (64 << 10, (32 << 10) - 64);
    for (length, expected) in
        [(size, vec![21_846, 21_846, 21_844]), (most, vec![most]), (most + 1, vec![16_353, 16_352])]
    {
        let mut window = ConnectionWindow::new(ConnectionSide::Replica, size as u64, true);
        let batch = window.collect_with([], (0, vec![1; length])).unwrap();
        let parts: Vec<_> = batch.copied_parts(most).collect();
        let lengths: Vec<usize> = parts.iter().map(|part| part.data.len()).collect();
        assert_eq!(lengths, expected);
        let ends = parts.iter().map(|part| part.offset as usize + part.data.len());
        assert!(ends.eq(parts.iter().skip(1).map(|part| part.offset as usize).chain([length])));
        assert!(
            parts
                .iter()
                .rev()
                .map(|part| part.last)
                .eq([true, false, false].into_iter().take(parts.len()))
        );
    }
}
