//! What another node says on the link: a hello to this one's listener, and a listener's answer to
//! this one's hello.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rackbus_identity::Versions;
use rackbus_link::shm::{ShmLink, hear};
use rackbus_link::{Connect, Hello, HelloReply, LinkError, Purpose, VERSIONS};
use rackbus_memory::{AsHandle, Event, Stream};

use crate::input::Input;

/// Words of hellos and welcomes.
pub const WORDS: &[&str] = &[
    "\"version\":1",
    "\"rack\":\"lab\"",
    "\"from\":\"beta\"",
    "\"to\":\"alpha\"",
    "\"service\":",
    "\"segments\"",
    "{\"function\":{\"device\":",
    "\"lease\":",
    "\"epoch\":",
    "\"accepted\"",
    "{\"refused\":\"",
    "null",
    "\\u0000",
];
/// Bytes that a peer says at most, so that a socket takes them without anybody listening.
const MOST: usize = 16 << 10;

/// Says what `data` holds, as who connects or as who answers.
pub fn run(data: &[u8]) {
    let mut input = Input::new(&data[..data.len().min(MOST)]);
    let choice = input.u8();
    let mut said = Vec::new();
    if choice & 2 == 0 {
        // Mostly the length is right.
        said.extend_from_slice(&(input.rest().len() as u32).to_le_bytes());
    }
    said.extend_from_slice(input.rest());
    match choice & 1 {
        0 => say_hello(&said, choice & 4 != 0),
        _ => answer(&said),
    }
}

fn frame(text: &[u8]) -> (usize, &[u8]) {
    let (length, text) = text.split_at(4);
    (u32::from_le_bytes(length.try_into().expect("four bytes")) as usize, text)
}

fn say_hello(said: &[u8], passes: bool) {
    let (near, mut far) = UnixStream::pair().expect("there is room for it");
    let event = Event::new().expect("there is room for it");
    if passes && !said.is_empty() {
        far.send(&[said], &[event.as_handle()]).expect("the socket takes it");
    } else {
        far.write_all(said).expect("the socket takes it");
    }
    far.shutdown(Shutdown::Write).expect("it is open");
    match hear(near, "lab", "alpha") {
        Some((incoming, _)) => {
            let Hello { rack, to, .. } = &incoming.hello;
            assert_eq!((&rack[..], &to[..]), ("lab", "alpha"));
            assert!(
                VERSIONS.common(incoming.hello.versions) == Ok(incoming.version),
                "{incoming:?}"
            );
            assert!(!passes, "descriptors beside a hello were taken");
            if incoming.hello.service == Purpose::Segments {
                incoming.accept().expect("the peer is there");
            } else {
                incoming.refuse("it is only a test");
            }
        }
        None if said.len() < 4 => return,
        None => {}
    }
    let mut answer = Vec::new();
    // What was said and not read resets the connection; the answer came before.
    let _ = far.read_to_end(&mut answer);
    if !answer.is_empty() {
        let (length, text) = frame(&answer);
        assert_eq!(length, text.len(), "an answer is one frame");
        serde_json::from_slice::<HelloReply>(text).expect("an answer is a welcome");
    }
}

fn answer(said: &[u8]) {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("rackbus-fuzz-{}-{number}.sock", std::process::id());
    let path = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).expect("nobody else has this name");
    let hello = Hello {
        versions: VERSIONS,
        rack: "lab".to_owned(),
        from: "alpha".to_owned(),
        to: "beta".to_owned(),
        service: Purpose::Segments,
    };
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut peer, _) = listener.accept().expect("somebody connects");
            let mut length = [0; 4];
            peer.read_exact(&mut length).expect("a hello comes");
            let mut text = vec![0; u32::from_le_bytes(length) as usize];
            peer.read_exact(&mut text).expect("a hello comes whole");
            let heard: Hello = serde_json::from_slice(&text).expect("it is a hello");
            assert_eq!(heard.service, Purpose::Segments);
            // Who has enough hears no more.
            let _ = peer.write_all(said);
        });
        let link = ShmLink::new("lab", Path::new("/"), []);
        link.connect(&path.display().to_string(), &hello)
    });
    let _ = std::fs::remove_file(&path);
    let framed =
        |length: &[u8; 4]| said.get(4..4_usize.checked_add(u32::from_le_bytes(*length) as usize)?);
    let framed = said.first_chunk().and_then(framed);
    let welcome = framed.and_then(|text| serde_json::from_slice::<HelloReply>(text).ok());
    match outcome {
        Ok(_) => {
            let answer = welcome.expect("it has said nothing that is an answer");
            let version = match answer {
                HelloReply::Accepted => return,
                HelloReply::AcceptedAs(version) => version,
                HelloReply::Refused(reason) => panic!("{reason:?} was taken for a welcome"),
            };
            assert!(VERSIONS.common(Versions::new(version, version)).is_ok(), "{version}");
        }
        Err(LinkError::Refused { reason, .. }) => {
            if let Some(welcome) = welcome {
                assert_eq!(welcome, HelloReply::Refused(reason));
            }
        }
        Err(LinkError::Protocol { .. } | LinkError::Broken { .. }) => {}
        Err(error @ LinkError::Unreachable { .. }) => panic!("{error}"),
    }
}

/// Hellos for both services, and both answers.
pub fn seeds() -> Vec<Vec<u8>> {
    let hello = |service| Hello {
        versions: VERSIONS,
        rack: "lab".to_owned(),
        from: "beta".to_owned(),
        to: "alpha".to_owned(),
        service,
    };
    let function = Purpose::Function { device: "nvme0".to_owned(), lease: 3, epoch: 7 };
    let medium =
        Purpose::Medium { device: "nvme0".to_owned(), lease: 3, epoch: 7, lanes: Vec::new() };
    let said = |choice: u8, text: String| [&[choice], text.as_bytes()].concat();
    let json = |value: &Hello| serde_json::to_string(value).expect("it is plain data");
    vec![
        said(0, json(&hello(Purpose::Segments))),
        said(0, json(&hello(function))),
        said(4, json(&hello(Purpose::Segments))),
        said(0, json(&hello(medium))),
        said(1, "\"accepted\"".to_owned()),
        said(1, "{\"refused\":\"no\"}".to_owned()),
    ]
}
