//! A session is saved while it is used, and another engine, as in another process, continues
//! with it on the same socket: the client does not notice.

#[path = "../common/mod.rs"]
mod common;
mod stored;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use common::{Copier, copy, map};
use proptest::prelude::*;
use rackbus_memory::{Access, Event, Lending, SharedMemory};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{
    Client, Ended, EngineDevice, RestingConversation, ServedDevice, SessionState, serve_until,
};
use rackbus_pci::{Endpoint, Engine, FunctionState, RestoreError, SaveError};
use rackbus_spec::vfio_user::irq;
use std::os::fd::AsFd;

/// A life of the function: an engine and a thread that holds the conversation.
struct Life {
    engine: Engine,
    device: EngineDevice,
    pause: Arc<Event>,
    thread: JoinHandle<Ended>,
}

impl Life {
    fn start(
        engine: Engine,
        device: EngineDevice,
        from: RestingConversation,
        stream: &Arc<UnixStream>,
    ) -> Life {
        let pause = Arc::new(Event::new().unwrap());
        let thread = std::thread::spawn({
            let (device, pause, stream) = (device.clone(), pause.clone(), stream.clone());
            move || serve_until(&*stream, &device, from, &*pause).unwrap()
        });
        Life { engine, device, pause, thread }
    }

    fn first(stream: &Arc<UnixStream>) -> Life {
        let engine = engine();
        let device = EngineDevice::new(engine.handle().clone()).unwrap();
        let device = device.session_of(Lending::alone(), Some(stream.clone())).unwrap();
        Life::start(engine, device, RestingConversation::default(), stream)
    }

    /// Ends it; what is left is bytes and descriptors.
    fn end(self) -> (Vec<u8>, Vec<OwnedFd>) {
        self.pause.ring();
        let Ended::Paused(conversation) = self.thread.join().unwrap() else {
            panic!("the client is there");
        };
        let saved = self.device.save(conversation.clone()).unwrap();
        assert!(matches!(self.device.save(conversation), Err(SaveError::Ended)));
        drop((self.device, self.engine));
        (saved.state.to_bytes().unwrap(), saved.descriptors)
    }

    fn next(bytes: &[u8], descriptors: Vec<OwnedFd>, stream: &Arc<UnixStream>) -> Life {
        let engine = engine();
        let state = SessionState::from_bytes(bytes).unwrap();
        let handle = engine.handle().clone();
        let (device, conversation) = EngineDevice::resume(
            handle,
            state,
            descriptors,
            Lending::alone(),
            Some(stream.clone()),
        )
        .unwrap();
        Life::start(engine, device, conversation, stream)
    }
}

fn engine() -> Engine {
    Engine::start("copier", Copier::new(), EngineOptions::default()).unwrap()
}

#[test]
fn another_engine_goes_on_with_memory_interrupts_and_registers() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let theirs = Arc::new(theirs);
    let life = Life::first(&theirs);
    let client = Client::with_stream(Arc::new(ours)).unwrap();
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    // MSI-X on.
    client.write(7, 0x92, &0x8000u16.to_le_bytes()).unwrap();
    client.write(4, 0x20, &[7; 16]).unwrap();
    let memory = map(&client, 0x10_0000, 0x4000);
    client.dma_map(0x20_0000, 0x1000, Access::READ, None).unwrap();
    let event = Event::new().unwrap();
    client.wire_irqs(irq::MSIX, 0, &[Some(event.as_fd().try_clone_to_owned().unwrap())]).unwrap();
    memory.whole().copy_from(b"the quick brown fox");
    assert_eq!(copy(&client, 0x10_0000, 0x10_1000, 19), 1);
    assert!(event.wait(Some(10_000_000_000)));

    let (bytes, descriptors) = life.end();
    assert_eq!(descriptors.len(), 3, "the right to go on, a file and an eventfd");
    // Sent while nobody listens: the next life answers it.
    client.post(0, common::LENGTH, &5u64.to_le_bytes()).unwrap();
    let life = Life::next(&bytes, descriptors, &theirs);

    let mut word = [0; 8];
    client.read(0, common::LENGTH, &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 5);
    client.read(0, common::SOURCE, &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 0x10_0000, "a register of the life before");
    let mut entry = [0; 16];
    client.read(4, 0x20, &mut entry).unwrap();
    assert_eq!(entry, [7; 16]);
    assert_eq!(copy(&client, 0x10_0000, 0x10_2000, 19), 1);
    assert!(event.wait(Some(10_000_000_000)), "the same eventfd");
    let mut out = [0; 19];
    memory.region().slice(0x2000, 19).unwrap().copy_to(&mut out);
    assert_eq!(&out, b"the quick brown fox");
    client.dma_unmap(0x20_0000, 0x1000).unwrap();
    client.dma_unmap(0x10_0000, 0x4000).unwrap();
    assert_eq!(copy(&client, 0x10_0000, 0x10_2000, 1), 2, "nothing else is mapped");
    let (bytes, descriptors) = life.end();
    assert_eq!(descriptors.len(), 2, "no memory is kept that is not mapped");
    drop(Life::next(&bytes, descriptors, &theirs).end());
}

/// A function in use, as a value.
fn saved() -> (FunctionState, Vec<OwnedFd>) {
    let mut endpoint = Endpoint::new(Copier::new());
    let memory = SharedMemory::create("user", 0x2000).unwrap();
    let access = Access::READ | Access::WRITE;
    endpoint.map(0x1000, 0x2000, access, Some(memory.handle(0))).unwrap();
    endpoint.write(FunctionRegion::Config, 4, &6u16.to_le_bytes()).unwrap();
    let event = Event::new().unwrap();
    let wire = Some(event.as_fd().try_clone_to_owned().unwrap());
    endpoint.set_irqs(IrqChange::WireVectors(3, vec![wire])).unwrap();
    let saved = endpoint.save().unwrap();
    (saved.state, saved.descriptors)
}

#[test]
fn a_saved_endpoint_does_nothing_more() {
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.write(FunctionRegion::Config, 4, &6u16.to_le_bytes()).unwrap();
    endpoint.save().unwrap();
    let mut data = [0; 8];
    endpoint.write(FunctionRegion::Bar(0), common::GO, &1u64.to_le_bytes()).unwrap();
    endpoint.read(FunctionRegion::Bar(0), common::STATUS, &mut data).unwrap();
    assert_eq!(data, [0xff; 8]);
    assert_eq!(endpoint.poll(1), rackbus_pci::Work::Asleep(None));
    endpoint.scrub();
    assert!(matches!(endpoint.save(), Err(SaveError::Ended)));
}

#[test]
fn a_newer_version_and_wrong_descriptors_are_refused() {
    let (state, descriptors) = saved();
    let text = String::from_utf8(state.to_bytes().unwrap()).unwrap();
    let newer = text.replacen("\"version\":1", "\"version\":2", 1).into_bytes();
    let error = FunctionState::from_bytes(&newer).unwrap_err();
    assert!(matches!(error, RestoreError::Newer { found: 2, known: 1 }), "{error}");
    assert!(error.to_string().contains("use a newer program"), "{error}");
    let mut endpoint = Endpoint::new(Copier::new());
    let error = endpoint.restore(&state, Vec::new()).unwrap_err();
    assert!(error.to_string().contains("0 descriptors instead of 3"), "{error}");
    let swapped = descriptors.into_iter().rev().collect();
    assert!(endpoint.restore(&state, swapped).is_err(), "an eventfd is no memory");
    assert!(endpoint.dma().is_empty(), "nothing is left of what was refused");
}

/// Copies of the value and of its descriptors, which another process may have, are of no use to it.
#[test]
fn a_state_is_restored_once() {
    let (state, descriptors) = saved();
    let copies = || descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let mut wrong: Vec<OwnedFd> = copies();
    wrong.swap(1, 2);
    let refused = Endpoint::new(Copier::new()).restore(&state, wrong).unwrap_err();
    assert!(!matches!(refused, RestoreError::Taken), "{refused}");
    // What was refused was not restored.
    let mut second = Endpoint::new(Copier::new());
    second.restore(&state, copies()).unwrap();
    let mut third = Endpoint::new(Copier::new());
    let refused = third.restore(&state, copies()).unwrap_err();
    assert!(matches!(refused, RestoreError::Taken), "{refused}");
    assert!(third.dma().is_empty() && !second.dma().is_empty());
    let next = second.save().unwrap();
    Endpoint::new(Copier::new()).restore(&next.state, next.descriptors).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the bytes say, they are restored or refused.
    #[test]
    fn damaged_states_do_no_harm(
        at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>(),
        number: u64, which in any::<prop::sample::Index>(),
    ) {
        let (state, descriptors) = saved();
        let bytes = state.to_bytes().unwrap();
        let mut changed = bytes.clone();
        let place = at.index(bytes.len());
        changed[place] = byte;
        let _ = FunctionState::from_bytes(&bytes[..cut.index(bytes.len())]);
        let numbers = common::numbers(&bytes);
        let other = common::with_number(&bytes, numbers[which.index(numbers.len())].clone(), number);
        for bytes in [changed, other] {
            if let Ok(state) = FunctionState::from_bytes(&bytes) {
                let own = descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
                let _ = Endpoint::new(Copier::new()).restore(&state, own);
            }
        }
    }
}

#[test]
fn a_function_that_was_saved_is_taken_back_once_and_goes_on() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let theirs = Arc::new(theirs);
    let Life { engine, device, pause, thread } = Life::first(&theirs);
    let client = Client::with_stream(Arc::new(ours)).unwrap();
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    let memory = map(&client, 0x10_0000, 0x4000);
    memory.whole().copy_from(b"the quick brown fox");
    pause.ring();
    let Ended::Paused(conversation) = thread.join().unwrap() else { panic!("it closed") };
    let saved = device.save(conversation.clone()).unwrap();
    let copies = saved.descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let bytes = saved.state.to_bytes().unwrap();
    device.take_back(saved).unwrap();
    // Whoever has a copy comes too late.
    let other = self::engine();
    let state = SessionState::from_bytes(&bytes).unwrap();
    let (handle, stream) = (other.handle().clone(), Some(theirs.clone() as Arc<_>));
    let taken = EngineDevice::resume(handle, state, copies, Lending::alone(), stream);
    assert!(matches!(taken, Err(RestoreError::Taken)));

    let life = Life::start(engine, device, conversation, &theirs);
    assert_eq!(copy(&client, 0x10_0000, 0x10_1000, 19), 1);
    drop(client);
    assert!(matches!(life.thread.join().unwrap(), Ended::Closed));
}

#[test]
fn what_somebody_went_on_with_is_not_taken_back() {
    let first = engine();
    let device = EngineDevice::new(first.handle().clone()).unwrap();
    let saved = device.save(RestingConversation::default()).unwrap();
    let copies = saved.descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let next = engine();
    EngineDevice::resume_unused(next.handle(), saved.state.clone(), copies).unwrap();
    assert!(matches!(device.take_back(saved), Err(RestoreError::Taken)));
    assert_eq!(device.read(FunctionRegion::Config, 0, 2).unwrap(), [0xff; 2], "it does something");
}
