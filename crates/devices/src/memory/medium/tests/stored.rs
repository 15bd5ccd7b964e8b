//! States of this and of earlier versions, in files: a function, a front and its lender continue from each of them.

use rackbus_memory::InheritedEnd;
use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_pci::{FunctionState, MediumRefused};
use rackbus_seeds::stored::StoredStates;

use super::super::super::function::VERSION;
use super::*;

fn stored(name: &'static str) -> StoredStates {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/memory/medium/tests/stored");
    StoredStates::new(folder, name, VERSION)
}

fn read(text: &str) -> FunctionState {
    FunctionState::from_bytes(text.as_bytes()).unwrap()
}

fn load(endpoint: &mut Endpoint) -> [u8; 8] {
    let mut data = [0; 8];
    endpoint.read(FunctionRegion::Bar(BAR), 64, &mut data).unwrap();
    data
}

/// Version 1 does not say whether a front elsewhere has the medium. Its file is that of version 2 without this.
#[test]
fn a_function_continues_from_what_each_version_wrote() {
    for version in 1..=VERSION {
        let span = MemorySpan::memory(SIZE, AtReturn::Keep).unwrap();
        let mut first = Endpoint::new(Box::new(MemoryFunction::new(span, 7).unwrap()));
        first.write(FunctionRegion::Config, 4, &[2, 0]).unwrap();
        first.write(FunctionRegion::Bar(BAR), 64, b"content!").unwrap();
        first.serve_medium(None).unwrap();
        // The memory and the descriptors are those of this function, which did the same as the one that was stored.
        let saved = first.save().unwrap();
        stored("function").compare(&saved.state.to_bytes().unwrap());
        drop(first);
        let span = MemorySpan::again(None, SIZE, AtReturn::Keep, saved.medium).unwrap();
        let mut next = Endpoint::new(Box::new(MemoryFunction::new(span, 7).unwrap()));
        next.restore(&read(&stored("function").read(version)), saved.descriptors)
            .unwrap_or_else(|error| panic!("version {version}: {error}"));
        assert_eq!(&load(&mut next), b"content!", "version {version}");
        let served = matches!(next.serve_medium(None), Err(MediumRefused::InUse));
        assert_eq!(served, version > 1, "who has the medium");
        next.scrub();
        next.serve_medium(None).unwrap();
    }
}

/// A store of its front was not taken when it was saved.
#[test]
fn a_lender_continues_from_what_this_version_wrote() {
    let (function, files) = lender();
    let mut front = Exchange::join(files, LAYOUT).unwrap();
    let mut first = Endpoint::new(Box::new(function));
    front.data(TAG, 8).unwrap().get().copy_from(b"content!");
    let ask = Ask { offset: 64.into(), length: 8.into(), kind: kind::WRITE, spare: [0; 3] };
    front.send(ask.as_bytes(), Some((TAG, 8))).unwrap();
    front.ring();
    let mut saved = first.save().unwrap();
    stored("lender").compare(&saved.state.to_bytes().unwrap());
    drop(first);
    let exchange = saved.medium.split_off(MemorySpan::file_count(false));
    let span = MemorySpan::again(None, SIZE, AtReturn::Keep, saved.medium).unwrap();
    let mut function = MemoryFunction::new(span, 7).unwrap();
    function.inherited.files = exchange;
    let mut next = Endpoint::new(Box::new(function));
    next.restore(&read(&stored("lender").read(VERSION)), saved.descriptors).unwrap();
    for _ in 0..3 {
        next.poll(0);
    }
    let mut answer = [0; MESSAGE_BYTES];
    assert_eq!((front.receive(&mut answer), answer[0]), (Some(4), 1));
    assert_eq!(front.receive(&mut answer), None, "it is done twice");
    next.write(FunctionRegion::Config, 4, &[2, 0]).unwrap();
    assert_eq!(&load(&mut next), b"content!");
}

#[test]
fn a_front_continues_from_what_this_version_wrote() {
    let (function, files) = lender();
    let over = Arc::new(AtomicBool::new(false));
    let ended = over.clone();
    let serving = std::thread::spawn(move || {
        let mut endpoint = Endpoint::new(Box::new(function));
        while !ended.load(Ordering::Relaxed) {
            endpoint.poll(0);
            std::thread::yield_now();
        }
    });
    let described = || Described::read("{\"size\": 1048576, \"serial\": 7}").unwrap();
    let exchange = FrontExchange::join(files, LAYOUT, Lost::new(|| {})).unwrap();
    let mut first = Endpoint::new(Box::new(RemoteMemory::over(described(), exchange)));
    first.write(FunctionRegion::Config, 4, &[2, 0]).unwrap();
    first.write(FunctionRegion::Bar(BAR), 64, b"content!").unwrap();
    let saved = first.save().unwrap();
    stored("front").compare(&saved.state.to_bytes().unwrap());
    drop(first);
    let end = InheritedEnd { files: saved.medium, session: None };
    let exchange = FrontExchange::again(end, LAYOUT, Lost::new(|| {})).unwrap();
    let mut next = Endpoint::new(Box::new(RemoteMemory::over(described(), exchange)));
    assert_eq!(load(&mut next), [0xff; 8], "it asks before it was restored");
    next.restore(&read(&stored("front").read(VERSION)), saved.descriptors).unwrap();
    assert_eq!(&load(&mut next), b"content!");
    next.write(FunctionRegion::Bar(BAR), 64, b"goes on!").unwrap();
    assert_eq!(&load(&mut next), b"goes on!");
    over.store(true, Ordering::Relaxed);
    serving.join().unwrap();
}

#[test]
fn a_state_of_a_newer_version_is_refused() {
    let span = || MemorySpan::memory(SIZE, AtReturn::Keep).unwrap();
    let mut first = Endpoint::new(Box::new(MemoryFunction::new(span(), 7).unwrap()));
    let saved = first.save().unwrap();
    let text = String::from_utf8(saved.state.to_bytes().unwrap()).unwrap();
    let model = format!("\"class\":\"memory\",\"version\":{VERSION}");
    let newer = text.replacen(&model, "\"class\":\"memory\",\"version\":99", 1);
    assert_ne!(newer, text);
    let mut next = Endpoint::new(Box::new(MemoryFunction::new(span(), 7).unwrap()));
    let refused = next.restore(&read(&newer), saved.descriptors).unwrap_err();
    let expected =
        format!("the state has version 99, this program knows {VERSION}; use a newer program");
    assert_eq!(refused.to_string(), expected);
}
