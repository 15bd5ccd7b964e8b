//! Memory behind an exchange, which lies in shared memory here: each access is there when it is over, and what either end may
//! not do.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_memory::{Exchange, Handles};
use rackbus_pci::Endpoint;
use rackbus_pci::endpoint::FunctionRegion;
use zerocopy::IntoBytes;

use super::super::BAR;
use super::super::function::{Described, MemoryFunction};
use super::super::span::{AtReturn, MemorySpan};
use super::*;
use crate::front_exchange::FrontExchange;
use crate::lost::Lost;

mod stored;

const SIZE: u64 = 1 << 20;

/// A lender whose memory an exchange leads to, and the other end of that.
fn lender() -> (MemoryFunction, rackbus_memory::ExchangeHandles) {
    let span = MemorySpan::memory(SIZE, AtReturn::Keep).unwrap();
    let mut function = MemoryFunction::new(span, 7).unwrap();
    let (exchange, files) = Exchange::create("memory", LAYOUT).unwrap();
    function.port = Some(MemoryPort::over(exchange));
    (function, files)
}

#[test]
fn what_is_stored_is_loaded_whatever_its_length() {
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
    let described = Described::read("{\"size\": 1048576, \"serial\": 7}").unwrap();
    let lost = Lost::new(|| {});
    let exchange = FrontExchange::join(files, LAYOUT, lost.clone()).unwrap();
    let mut front = Endpoint::new(Box::new(RemoteMemory::over(described, exchange)));
    front.write(FunctionRegion::Config, 4, &[2, 0]).unwrap();
    let bar = FunctionRegion::Bar(BAR);
    for (at, length) in [(0, 1), (3, 8), (4090, 100), (65_000, 200_001), (SIZE - 5, 5)] {
        let data: Vec<u8> = (0..length).map(|it: u32| (it * 31 + 1) as u8).collect();
        front.write(bar, at, &data).unwrap();
        let mut read = vec![0; data.len()];
        front.read(bar, at, &mut read).unwrap();
        assert!(read == data, "{length} bytes at {at}");
    }
    // Each access is one, however many questions it took.
    let counts = front.operations().counts(&[]);
    let counted: Vec<_> = counts.iter().map(|(name, of)| (*name, of.done, of.failed)).collect();
    assert_eq!(counted, [("read", 5, 0), ("write", 5, 0)]);
    assert_eq!(counts[0].1.bytes, 1 + 8 + 100 + 200_001 + 5);
    over.store(true, Ordering::Relaxed);
    serving.join().unwrap();
    // Nobody answers any more.
    lost.set();
    let mut read = [0; 8];
    front.read(bar, 0, &mut read).unwrap();
    assert_eq!(read, [0xff; 8]);
    assert_eq!(front.operations().counts(&[])[0].1.failed, 1);
}

/// The same as if its user was here: the function is not healthy any more.
#[test]
fn a_store_that_its_lender_loses_shows() {
    let file = rackbus_memory::SharedMemory::create("memory", SIZE).unwrap().descriptor().unwrap();
    let only_read = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let mut handles = Handles::of_descriptors(vec![only_read.into()]);
    let span = MemorySpan::elsewhere(&mut handles, SIZE).unwrap();
    let mut function = MemoryFunction::new(span, 7).unwrap();
    let (exchange, files) = Exchange::create("memory", LAYOUT).unwrap();
    function.port = Some(MemoryPort::over(exchange));
    let mut endpoint = Endpoint::new(Box::new(function));
    let mut front = Exchange::join(files, LAYOUT).unwrap();
    let mut answer = [0; rackbus_memory::exchange::MESSAGE_BYTES];
    for (kind, done) in [(kind::READ, 1), (kind::WRITE, 0)] {
        assert!(endpoint.health().trouble().is_none());
        let ask = Ask { offset: 0.into(), length: 8.into(), kind, spare: [0; 3] };
        front.send(ask.as_bytes(), None).unwrap();
        front.ring();
        endpoint.poll(0);
        assert_eq!((front.receive(&mut answer), answer[0]), (Some(4), done));
    }
    assert!(endpoint.health().trouble().is_some_and(|text| text.contains("a store was lost")));
}

#[test]
fn a_front_that_breaks_the_rules_is_disconnected() {
    let ask = |kind: u8, offset: u64, length: u32| {
        let (offset, length) = (offset.into(), length.into());
        Ask { offset, length, kind, spare: [0; 3] }.as_bytes().to_vec()
    };
    for message in [
        vec![],
        vec![1; 60],
        ask(3, 0, 8),
        ask(kind::READ, 0, 0),
        ask(kind::READ, SIZE, 1),
        ask(kind::WRITE, SIZE - 1, 2),
        ask(kind::READ, u64::MAX, 8),
        ask(kind::READ, 0, LAYOUT.data_bytes as u32 + 1),
    ] {
        let (function, files) = lender();
        let mut front = Exchange::join(files, LAYOUT).unwrap();
        front.send(&message, None).unwrap();
        front.ring();
        let mut endpoint = Endpoint::new(Box::new(function));
        endpoint.poll(0);
        assert!(front.is_closed(), "{message:?}");
    }
}

#[test]
fn a_description_of_no_memory_is_refused() {
    for text in ["", "{}", "{\"size\": 0, \"serial\": 1}", "{\"size\": 12288, \"serial\": 1}"] {
        assert!(Described::read(text).is_err(), "{text}");
    }
}
