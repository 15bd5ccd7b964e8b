//! Every target on its seeds and on mutations of them, always the same ones: a few seconds of what
//! `make fuzz` does for minutes.

use rackbus_fuzz::exchange::{self, ExchangeMistake};
use rackbus_fuzz::{TARGETS, Target};
use rackbus_seeds::Random;

/// One small change of an input.
fn mutate(random: &mut Random, input: &mut Vec<u8>, target: &Target, others: &[Vec<u8>]) {
    let at = random.below(input.len() + 1);
    match random.below(8) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = random.next() as u8,
        2 => input.insert(at, [0, 1, 0x7f, 0x80, 0xff][random.below(5)]),
        3 => input.truncate(at.max(1)),
        4 => drop(input.drain(at..(at + 1 + random.below(8)).min(input.len()))),
        5 => {
            let word = target.words.get(random.below(target.words.len()));
            input.splice(at..at, word.copied().unwrap_or("\x01\x02").bytes());
        }
        6 => {
            let other = &others[random.below(others.len())];
            let from = random.below(other.len());
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        _ => {
            let end = (at + 1 + random.below(32)).min(input.len());
            let part = input[at..end].to_vec();
            input.splice(at..at, part);
        }
    }
}

/// The mutation of the seeds that this number stands for.
fn mutation(number: u64, target: &Target, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut random = Random(number);
    let mut input = seeds[random.below(seeds.len())].clone();
    for _ in 0..1 + random.below(6) {
        mutate(&mut random, &mut input, target, seeds);
    }
    input
}

fn short(name: &str, mutations: u64) {
    let target = rackbus_fuzz::target(name).expect("it is in the table");
    let seeds = (target.seeds)();
    seeds.iter().for_each(|seed| (target.run)(seed));
    (target.run)(&[]);
    for number in 0..mutations {
        let input = mutation(number, target, &seeds);
        let run = std::panic::AssertUnwindSafe(|| (target.run)(&input));
        if std::panic::catch_unwind(run).is_err() {
            let file = std::env::temp_dir().join(format!("rackbus-fuzz-{name}-{number}"));
            std::fs::write(&file, &input).expect("the input can be kept");
            let file = file.display();
            panic!("replay it with: cargo run -p rackbus-fuzz -- replay {name} {file}");
        }
    }
}

macro_rules! targets {
    ($($test:ident: $name:literal, $mutations:literal;)*) => {
        $(#[test]
        fn $test() {
            short($name, $mutations);
        })*

        #[test]
        fn each_target_has_a_short_form() {
            let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$($name),*]);
        }
    };
}

targets! {
    vfio_user: "vfio-user", 2000;
    vfio_user_client: "vfio-user-client", 5000;
    nvme: "nvme", 2000;
    nvme_medium: "nvme-medium", 2000;
    accel: "accel", 5000;
    accel_function: "accel-function", 1000;
    accel_state: "accel-state", 500;
    nic: "nic", 3000;
    nic_state: "nic-state", 2000;
    nic_medium: "nic-medium", 2000;
    memory_medium: "memory-medium", 2000;
    network: "network", 500;
    state: "state", 2000;
    link: "link", 2000;
    arenas: "arenas", 2000;
    window: "window", 5000;
    exchange: "exchange", 5000;
    packets: "packets", 2000;
    segment: "segment", 10000;
    guest: "guest", 10000;
    agent: "agent", 500;
    rack: "rack", 2000;
    model: "model", 2000;
    tools: "tools", 2000;
    api: "api", 300;
}

/// A target that does not find what an end of an exchange does wrong would prove nothing.
#[test]
fn mistakes_of_an_exchange_are_found() {
    let target = rackbus_fuzz::target("exchange").expect("it is in the table");
    let seeds = (target.seeds)();
    let mistakes = [
        ExchangeMistake::HearsTwice,
        ExchangeMistake::CountsMore,
        ExchangeMistake::GoesOn,
        ExchangeMistake::StaysExposed,
    ];
    for mistake in mistakes {
        let found = (0..1000).find(|number| {
            let input = mutation(*number, target, &seeds);
            let run = std::panic::AssertUnwindSafe(|| exchange::run_with(&input, mistake));
            std::panic::catch_unwind(run).is_err()
        });
        assert!(found.is_some(), "{mistake:?} was not found");
    }
}
