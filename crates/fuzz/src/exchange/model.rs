//! What the two sides of a carried exchange may say to each other, read from their bytes, apart from the code that is
//! driven.

use std::collections::VecDeque;

use rackbus_memory::exchange::{ExchangeLayout, MESSAGE_BYTES};

use crate::input::Input;

/// What kinds of frames there are.
pub(super) mod kind {
    pub const MESSAGE: u8 = 0;
    pub const RESUME: u8 = 1;
    pub const BEAT: u8 = 2;
    pub const LEFT: u8 = 3;
    pub const LANE: u8 = 4;
    pub const FETCH: u8 = 5;
    pub const FETCHED: u8 = 6;
}

const HEADER: usize = 20;
/// Bytes of a frame's data that a peer says at most, whatever it has said that follow.
const MOST_DATA: usize = 6000;

/// A frame that a peer says.
#[derive(Debug, Clone, Default)]
pub(super) struct SaidFrame {
    message: u16,
    kind: u8,
    data: u32,
    tag: u32,
    seen: u64,
    /// What all bytes behind the header are.
    byte: u8,
    /// Bytes of the frame that are not said.
    lacking: usize,
}

/// A header, read from bytes.
#[derive(Debug, Clone, Copy)]
struct Header {
    message: usize,
    kind: u8,
    data: usize,
    tag: u32,
    seen: u64,
}

impl Header {
    fn read(bytes: &[u8]) -> Option<Header> {
        let bytes: &[u8; HEADER] = bytes.first_chunk()?;
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Some(Header {
            message: u16::from_le_bytes([bytes[0], bytes[1]]).into(),
            kind: bytes[2],
            data: u32_at(4) as usize,
            tag: u32_at(8),
            seen: u64::from(u32_at(12)) | u64::from(u32_at(16)) << 32,
        })
    }
}

impl SaidFrame {
    /// One of this kind with nothing in it, by a peer that has so many messages.
    pub(super) fn of(kind: u8, seen: u64) -> SaidFrame {
        SaidFrame { kind, seen, ..SaidFrame::default() }
    }

    /// One that the input chooses; mostly one that may be, by a peer that has so many messages.
    pub(super) fn choose(input: &mut Input<'_>, layout: ExchangeLayout, has: u64) -> SaidFrame {
        let kind = input.u8() % 8;
        let message = match input.u8() {
            few @ 0..=199 => u16::from(few % 16),
            200..=230 => MESSAGE_BYTES as u16,
            231..=240 => MESSAGE_BYTES as u16 + 1,
            _ => input.u16(),
        };
        let byte = input.u8();
        let data = match input.u8() {
            few @ 0..=199 => u32::from(few),
            200..=219 => 4096,
            220..=239 => layout.data_bytes as u32,
            240..=244 => layout.data_bytes as u32 + 1,
            _ => input.u32(),
        };
        let tag = match input.u8() {
            few @ 0..=239 => u32::from(few) % (layout.tags + 1),
            _ => input.u32(),
        };
        let seen = match input.u8() {
            0..=199 => has,
            200..=219 => has.saturating_sub(1),
            220..=239 => has + 1,
            _ => input.u64(),
        };
        let plain = matches!(kind, kind::RESUME | kind::BEAT | kind::LANE | kind::FETCH);
        let message = if plain && message < 16 { 0 } else { message };
        // Zero in most inputs, as it is what is left of one that is used up.
        let lacking = usize::from(byte >> 7) * usize::from(byte & 15);
        SaidFrame { message, kind, data, tag, seen, byte, lacking }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.message.to_le_bytes().to_vec();
        bytes.extend([self.kind, 0]);
        bytes.extend(self.data.to_le_bytes());
        bytes.extend(self.tag.to_le_bytes());
        bytes.extend(self.seen.to_le_bytes());
        let has_data = matches!(self.kind, kind::MESSAGE | kind::FETCHED);
        let data = if has_data { (self.data as usize).min(MOST_DATA) } else { 0 };
        bytes.resize(HEADER + usize::from(self.message).min(MOST_DATA) + data, self.byte);
        bytes.truncate(bytes.len().saturating_sub(self.lacking).max(1));
        bytes
    }
}

/// A message that the peer has said, whole.
#[derive(Debug)]
struct Said {
    text: Vec<u8>,
    tag: u32,
    /// `None` of data that were left in their place.
    data: Option<Vec<u8>>,
}

/// What was said on one connection, and is not looked at.
#[derive(Debug, Default)]
struct Connection {
    said: Vec<u8>,
    /// What the peer had when the connection began, once it has said so.
    resumed: Option<u64>,
    /// The peer has broken the rules.
    wrong: bool,
    end_said: Vec<u8>,
    end_resumed: bool,
    /// Messages of the end that it has said on this connection.
    end_messages: u64,
    /// Data that the peer has asked for.
    fetches: VecDeque<(u32, usize)>,
}

/// What was said by both sides, and what has to be heard.
#[derive(Debug)]
pub(super) struct Saying {
    layout: ExchangeLayout,
    has_lane: bool,
    connection: Connection,
    /// What the peer has said on all connections, of which the end has heard so many.
    messages: Vec<Said>,
    heard: usize,
    /// What the end was given to send: message, tag and bytes of data.
    sent: Vec<(Vec<u8>, u32, usize)>,
    /// Messages of the end that the peer has, and that the end has said it has of the peer.
    peer_has: u64,
    end_has: u64,
}

impl Saying {
    pub(super) fn new(layout: ExchangeLayout, has_lane: bool) -> Saying {
        let connection = Connection::default();
        let (messages, sent) = Default::default();
        let (heard, peer_has, end_has) = (0, 0, 0);
        Saying { layout, has_lane, connection, messages, heard, sent, peer_has, end_has }
    }

    /// How many messages of the end the peer has heard.
    pub(super) fn heard_of_end(&self) -> u64 {
        self.peer_has
    }

    /// Whether the peer has broken the rules on this connection.
    pub(super) fn is_wrong(&self) -> bool {
        self.connection.wrong
    }

    /// The place of the end's next message. As many as there are places are not acknowledged at most, so none is in use.
    pub(super) fn next_tag(&self) -> u32 {
        self.sent.len() as u32 % self.layout.tags
    }

    /// The end was given this to send.
    pub(super) fn sent(&mut self, message: Vec<u8>, tag: u32, data: usize) {
        self.sent.push((message, tag, data));
    }

    /// Another connection is there. What was half said on the one before is lost.
    pub(super) fn reconnected(&mut self) {
        self.connection = Connection::default();
    }

    /// The peer has said these bytes.
    pub(super) fn said(&mut self, bytes: &[u8]) {
        self.connection.said.extend_from_slice(bytes);
        while !self.connection.wrong
            && let Some(used) = self.look()
        {
            self.connection.said.drain(..used);
        }
    }

    /// Takes the next frame, if it is whole; its length.
    fn look(&mut self) -> Option<usize> {
        let connection = &mut self.connection;
        let header = Header::read(&connection.said)?;
        let joined = connection.resumed.is_some();
        let carries = matches!(header.kind, kind::MESSAGE | kind::LEFT | kind::FETCHED);
        let fits = header.message <= MESSAGE_BYTES
            && header.data <= self.layout.data_bytes
            && header.tag < self.layout.tags;
        let may_come = match header.kind {
            kind::MESSAGE => joined && fits,
            kind::LEFT => joined && fits && self.has_lane,
            kind::FETCHED => joined && fits && self.has_lane && header.message == 0,
            kind::RESUME => !joined && header.message == 0,
            kind::BEAT | kind::LANE => joined && header.message == 0,
            kind::FETCH => joined && header.message == 0 && self.has_lane,
            _ => false,
        };
        if !may_come {
            connection.wrong = true;
            return None;
        }
        if !carries {
            if header.kind == kind::RESUME {
                connection.resumed = Some(header.seen);
            } else if header.kind == kind::FETCH {
                connection.fetches.push_back((header.tag, header.data));
            }
            return Some(HEADER);
        }
        let text = HEADER..HEADER + header.message;
        let data = if header.kind == kind::LEFT { 0 } else { header.data };
        let data = text.end..text.end + data;
        let bytes = connection.said.get(..data.end)?;
        if header.kind != kind::FETCHED {
            let left = header.kind == kind::LEFT;
            let data = (!left).then(|| bytes[data.clone()].to_vec());
            self.messages.push(Said { text: bytes[text].to_vec(), tag: header.tag, data });
        }
        Some(data.end)
    }

    /// The end has heard this message; `place` reads so many bytes of the place of a tag.
    ///
    /// # Panics
    /// When it is not what the peer has said next.
    pub(super) fn heard(&mut self, text: &[u8], place: impl Fn(u32, usize) -> Vec<u8>) {
        let said = self.messages.get(self.heard).expect("a message that nobody said is heard");
        assert_eq!(said.text, text, "not the next message is heard");
        // A lane moves data of later messages while this one waits.
        if let Some(data) = said.data.as_ref().filter(|_| !self.has_lane) {
            assert!(place(said.tag, data.len()) == *data, "a message's data are others");
        }
        self.heard += 1;
    }

    /// The end has said these bytes, and that it has so many messages `more` than they say.
    ///
    /// # Panics
    /// When it may not say that.
    pub(super) fn end_said(&mut self, bytes: &[u8], more: u64) {
        self.connection.end_said.extend_from_slice(bytes);
        while let Some(used) = self.look_at_end(more) {
            self.connection.end_said.drain(..used);
        }
    }

    fn look_at_end(&mut self, more: u64) -> Option<usize> {
        let connection = &mut self.connection;
        let header = Header::read(&connection.end_said)?;
        let has_data = matches!(header.kind, kind::MESSAGE | kind::FETCHED);
        let text = HEADER..HEADER + header.message;
        let end = text.end + if has_data { header.data } else { 0 };
        let counts = matches!(header.kind, kind::BEAT);
        let fits = header.message <= MESSAGE_BYTES && header.data <= self.layout.data_bytes;
        assert!(counts || fits, "longer than there is room: {header:?}");
        let text = connection.end_said.get(..end)?[text].to_vec();
        let has = header.seen + more;
        assert!(has <= self.messages.len() as u64, "it has messages that nobody said");
        assert!(has >= self.end_has, "it lacks what it had");
        self.end_has = has;
        let resumes = header.kind == kind::RESUME;
        assert!(resumes != connection.end_resumed, "what it has is said first, and once");
        connection.end_resumed = true;
        match header.kind {
            kind::MESSAGE | kind::LEFT => {
                assert!(self.has_lane || header.kind == kind::MESSAGE, "left without a lane");
                let first = connection.resumed.expect("nobody has asked for messages yet");
                let number = first + connection.end_messages;
                let sent = self.sent.get(number as usize).expect("it was not given more");
                assert_eq!(*sent, (text, header.tag, header.data), "message {number}");
                connection.end_messages += 1;
                self.peer_has = self.peer_has.max(number + 1);
            }
            kind::FETCHED => {
                let asked = connection.fetches.pop_front();
                assert_eq!(asked, Some((header.tag, header.data)), "nobody asked for these data");
            }
            kind::FETCH => assert!(header.tag < self.layout.tags, "there is no such place"),
            kind::LANE => assert!(header.tag <= 3, "no news of a lane are these"),
            kind::RESUME | kind::BEAT => {}
            other => panic!("no frame is of kind {other}"),
        }
        Some(end)
    }
}
