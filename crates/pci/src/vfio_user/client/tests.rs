//! Servers that answer what they should not, or as slowly as they like.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::Instant;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::*;

/// How long the clients of these tests wait.
const LIMIT: Duration = Duration::from_millis(200);
/// By when they have surely given up, on a machine that has other things to do.
const SURELY: Duration = Duration::from_secs(3);

/// A region of `size` bytes that lists these areas.
fn listing(size: u64, listed: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let info = RegionInfo {
        argsz: 1024,
        flags: (RegionInfoFlags::MMAP | RegionInfoFlags::CAPS).bits(),
        index: 0,
        cap_offset: size_u32::<RegionInfo>(),
        size,
        offset: 0,
    };
    let sparse = SparseMmap {
        header: CapHeader { id: CAP_SPARSE_MMAP, version: 1, next: 0 },
        nr_areas: count(listed.len()),
        reserved: 0,
    };
    let mut body = [info.as_bytes(), sparse.as_bytes()].concat();
    for (offset, size) in listed {
        body.extend_from_slice(SparseArea { offset: *offset, size: *size }.as_bytes());
    }
    areas(&body, &info)
}

#[test]
fn areas_that_are_not_inside_of_their_region_are_not_taken() {
    let outside =
        [(0x4000, 1), (0x3000, 0x1001), (u64::MAX, 2), (0x1000, u64::MAX), (0x1000, 0), (0, 0)];
    let inside = [(0, 0x1000), (0x3000, 0x1000)];
    assert_eq!(listing(0x4000, &[inside[0], outside[0], outside[1], inside[1]]), inside);
    for area in outside {
        assert_eq!(listing(0x4000, &[area]), [], "{area:x?}");
    }
    let all = RegionInfo { flags: RegionInfoFlags::MMAP.bits(), ..RegionInfo::new_zeroed() };
    assert_eq!(areas(&[], &all), [], "of a region that is not there");
    // Those that are outside do not keep the others from being seen, and no more are taken than there may be.
    let many: Vec<_> = (0..200).flat_map(|nth| [(0, 0), (nth * 4096, 4096)]).collect();
    assert_eq!(listing(1 << 20, &many).len(), MOST_AREAS);
}

/// The time limit is for an answer, not for each byte of it.
#[test]
fn a_server_that_answers_byte_by_byte_is_given_up() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    let server = std::thread::spawn(move || {
        WireMessage::receive(&theirs).unwrap();
        let body = [0; 200];
        let header = header(0, command::VERSION, Flags::REPLY.bits(), 0, body.len());
        for byte in [header.as_bytes(), &body].concat() {
            // Until the client has closed the connection.
            if theirs.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(LIMIT / 4);
        }
    });
    let begun = Instant::now();
    let error = Client::with_stream(Arc::new(ours)).unwrap_err();
    assert!(
        matches!(error, ClientError::Wire(WireError::Stream(StreamError::TimedOut))),
        "{error}"
    );
    assert!(begun.elapsed() < SURELY, "{:?}", begun.elapsed());
    server.join().unwrap();
}

#[test]
fn a_server_that_takes_no_connections_is_given_up() {
    let path = std::env::temp_dir().join(format!("rackbus-client-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket = |flags| {
        let flags = SocketFlags::CLOEXEC | flags;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = socket(SocketFlags::empty());
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // Others came before, and are not taken either.
    let mut others = Vec::new();
    loop {
        let other = socket(SocketFlags::NONBLOCK);
        match rustix::net::connect(&other, &address) {
            Ok(()) => others.push(other),
            Err(error) => break assert_eq!(error, Errno::AGAIN),
        }
    }
    let (told, outcome) = channel();
    let to = path.clone();
    std::thread::spawn(move || told.send(Client::connect(&to, LIMIT).map(drop)));
    let outcome = outcome.recv_timeout(SURELY);
    std::fs::remove_file(&path).unwrap();
    let error = outcome.expect("it still waits").unwrap_err();
    assert!(
        matches!(error, ClientError::Wire(WireError::Stream(StreamError::TimedOut))),
        "{error}"
    );
}
