//! Who asks all stations for an address that is known has the answer, and the others hear nothing of the question.

use super::*;

/// An ARP request of station `from` for the address of `about`.
fn request(world: &World, from: usize, about: [u8; 4]) -> Vec<u8> {
    let own = &world.stations.all()[from];
    let mut frame = [&[0xff; 6][..], &own.mac.0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    frame.extend([&own.mac.0[..], &own.ipv4.octets(), &[0; 6], &about].concat());
    frame
}

fn came(queue: &mut PortQueue) -> Option<Vec<u8>> {
    let frame = queue.next()?;
    let mut bytes = vec![0; frame.bytes.len()];
    frame.bytes.copy_to(&mut bytes);
    queue.consume();
    Some(bytes)
}

#[test]
fn a_question_for_a_known_address_is_answered_and_no_station_hears_it() {
    let mut world = World::new(1);
    let about = world.stations.all()[1].ipv4.octets();
    let question = request(&world, 0, about);
    assert!(world.queues[0].park(), "nothing came");
    world.queues[0].unpark();
    let sent = world.queues[0].send_checked(Offload::default(), &question, &[]);
    assert_eq!(sent, SendOutcome::Done);
    world.queues[0].flush();
    assert!(world.asked.0.lock().unwrap().is_empty(), "a ring to others was asked for");
    assert!(!world.queues[0].park(), "there is an answer");
    world.queues[0].unpark();
    // It stays the next one until it is consumed.
    assert_eq!(world.queues[0].next().unwrap().bytes.len(), 42);
    let answer = came(&mut world.queues[0]).unwrap();
    assert_eq!(
        answer[..12],
        [world.stations.all()[0].mac.0, world.stations.all()[1].mac.0].concat()
    );
    assert_eq!(answer[28..32], about);
    assert_eq!(came(&mut world.queues[0]), None);
    assert!(world.queues[0].park());
    let counters = world.queues[0].handle().counters();
    assert_eq!((counters.answered.get(), counters.groups.get()), (1, 0));
}

#[test]
fn a_question_for_an_address_that_nobody_is_known_to_have_goes_to_all() {
    let mut world = World::new(1);
    let question = request(&world, 0, [10, 77, 200, 200]);
    let send = |world: &mut World| {
        let sent = world.queues[0].send_checked(Offload::default(), &question, &[]);
        world.queues[0].flush();
        sent
    };
    assert_eq!(send(&mut world), SendOutcome::Full);
    world.answer(true);
    assert_eq!(send(&mut world), SendOutcome::Done);
    for station in 1..STATIONS {
        assert_eq!(came(&mut world.queues[station]).as_ref(), Some(&question));
    }
    assert_eq!(came(&mut world.queues[0]), None);
}

/// A ring's frame that was given out stays the next one while an answer comes, and answers keep no frames of others back for
/// longer than there are some.
#[test]
fn answers_come_between_frames_and_those_without_room_are_asked_of_all() {
    let mut world = World::new(1);
    let all = world.stations.all().to_vec();
    world.open(PortQueueId { station: 1, number: 0 }, 0);
    let frame = [&all[0].mac.0[..], &all[1].mac.0, &KIND, &[7; 50]].concat();
    world.queues[1].send_checked(Offload::default(), &frame, &[]);
    world.queues[1].flush();
    assert_eq!(world.queues[0].next().unwrap().bytes.len(), frame.len());
    let question = request(&world, 0, all[2].ipv4.octets());
    let mut asked = 0;
    while world.queues[0].send_checked(Offload::default(), &question, &[]) == SendOutcome::Done {
        asked += 1;
    }
    assert_eq!(asked, 64, "then the rings to all are waited for");
    assert_eq!(came(&mut world.queues[0]).as_ref(), Some(&frame));
    for _ in 0..asked {
        assert_eq!(came(&mut world.queues[0]).unwrap()[6..12], all[2].mac.0);
    }
    assert_eq!(came(&mut world.queues[0]), None);
}
