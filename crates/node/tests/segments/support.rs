//! What the tests of segments have in common.

use std::time::Duration;

use rackbus_attach::{AttachError, Refusal};
use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, AsHandle, HandleRef, Handles, Packets};
use rackbus_segment::Handle;
use rackbus_segment::message::{
    Notice, Reply, SessionEvent, SessionRequest, TargetKind, VERSION, decode, encode,
};

use crate::common::segments::{Hosts, name};

/// How many milliseconds a connect may take that is answered, whatever the answer is.
pub const LIMIT: u32 = 20_000;
pub const SOON: Option<Duration> = Some(Duration::from_secs(30));

/// A process that speaks the protocol itself.
pub struct Stranger {
    pub calls: Packets,
    pub events: Packets,
}

impl Stranger {
    pub fn attach(rack: &Hosts, node: u32) -> Stranger {
        let path = rack.folder().join(name(node)).join("segments.sock");
        let (events, theirs) = Packets::pair().unwrap();
        let stranger = Stranger { calls: Packets::connect(&path).unwrap(), events };
        let hello = SessionRequest::Hello { version: VERSION };
        let welcome = stranger.ask(&hello, &[theirs.as_handle()]);
        assert!(matches!(welcome, Some(Reply::Welcome(_))));
        stranger
    }

    pub fn ask(&self, request: &SessionRequest, handles: &[HandleRef<'_>]) -> Option<Reply> {
        self.ask_whole(request, handles).map(|(reply, _)| reply)
    }

    /// With what came beside the reply.
    pub fn ask_whole(
        &self,
        request: &SessionRequest,
        handles: &[HandleRef<'_>],
    ) -> Option<(Reply, Handles)> {
        self.calls.send(&encode(request), handles).ok()?;
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let packet = self.calls.receive(&mut buffer, &mut spin, None).ok()?;
        Some((decode(&buffer[..packet.length])?, packet.handles))
    }

    pub fn event(&self) -> SessionEvent {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let packet = self.events.receive(&mut buffer, &mut spin, None).unwrap();
        decode(&buffer[..packet.length]).unwrap()
    }

    pub fn notice(&self, notice: Notice) {
        self.events.send(&encode(&notice), &[]).unwrap();
    }

    /// Connects to a segment, as one of those who keep it.
    pub fn connect(&self, node: u32, id: u32) -> Handle {
        let request =
            SessionRequest::Connect { node, id, timeout_ms: LIMIT, what: TargetKind::Segment };
        let begun = std::time::Instant::now();
        loop {
            match self.ask(&request, &[]) {
                Some(Reply::Connected(connected)) => return connected.connection,
                Some(Reply::Refused(Refusal::NotResponding)) if begun.elapsed() < SOON.unwrap() => {
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// What the system says of a mapping: whether its writers wait, and of which file it is.
pub fn mapped(mapping: &rackbus_attach::Mapping) -> (bool, String) {
    let start = format!("{:x}-", mapping.whole().as_ptr() as usize);
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = all.lines().skip_while(|line| !line.starts_with(&start));
    let words: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
    // Not writable, or write-protected by userfaultfd.
    let frozen = !words[1].contains('w') || flags.split(' ').any(|flag| flag == "uw");
    (frozen, words[4].to_owned())
}

/// Waits until something is so that nothing tells.
pub fn until(what: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !what() {
        assert!(begun.elapsed() < SOON.unwrap(), "it does not come to that");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a node answers that is asked for something of another one's: again where the other one has not answered in the time
/// that its node gives it, which are three seconds, whatever is asked for.
pub fn answered<T>(ask: impl Fn() -> Result<T, AttachError>) -> Result<T, AttachError> {
    let begun = std::time::Instant::now();
    loop {
        match ask() {
            Err(AttachError::Refused(Refusal::NotResponding))
                if begun.elapsed() < SOON.unwrap() => {}
            answer => return answer,
        }
    }
}

pub fn refusal<T: std::fmt::Debug>(outcome: Result<T, AttachError>) -> Refusal {
    match outcome.unwrap_err() {
        AttachError::Refused(refusal) => refusal,
        other => panic!("{other}"),
    }
}

pub fn word(mapping: &rackbus_attach::Mapping, offset: usize) -> u64 {
    mapping.whole().read_obj::<u64>(offset).unwrap()
}
