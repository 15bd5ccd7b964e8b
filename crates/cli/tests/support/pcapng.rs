//! Captures as another program reads them: a reader of pcapng files (draft-ietf-opsawg-pcapng) that shares nothing with what
//! writes them.

/// What a capture has of the frames of one interface.
#[derive(Debug, Default)]
pub struct CaptureFile {
    /// The interface that the packet was captured at, by its option `if_name`.
    pub interface: String,
    /// The frames, in order.
    pub frames: Vec<CapturedFrame>,
}

/// A frame of a capture.
#[derive(Debug, PartialEq, Eq)]
pub struct CapturedFrame {
    /// When it was captured, in nanoseconds since 1970 in UTC.
    pub time_ns: u64,
    /// Whether the interface sent it.
    pub sent: bool,
    /// The frame, all of it.
    pub bytes: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

/// The options of a block: code and value.
fn options(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let (code, length) = (half(bytes, 0), usize::from(half(bytes, 2)));
        if code == 0 {
            assert!(length == 0 && bytes.len() == 4, "something follows the last option");
            break;
        }
        all.push((code, &bytes[4..4 + length]));
        bytes = &bytes[4 + length.next_multiple_of(4)..];
    }
    all
}

impl CaptureFile {
    /// Reads a file of one section with one interface of Ethernet frames.
    ///
    /// # Panics
    /// Where it is none.
    pub fn read(file: &[u8]) -> CaptureFile {
        let mut found = CaptureFile::default();
        let (mut at, mut blocks) = (0, 0);
        while at < file.len() {
            let (kind, length) = (word(file, at), word(file, at + 4) as usize);
            assert!(length % 4 == 0 && length >= 12, "a block of {length} bytes");
            assert_eq!(word(file, at + length - 4) as usize, length, "its length at its end");
            let body = &file[at + 8..at + length - 4];
            match (blocks, kind) {
                (0, 0x0a0d_0d0a) => {
                    assert_eq!((word(body, 0), half(body, 4)), (0x1a2b_3c4d, 1), "a section");
                    options(&body[16..]);
                }
                (1, 1) => found.interface = interface(body),
                (2.., 6) => found.frames.push(frame(body)),
                other => panic!("block {other:?}"),
            }
            (at, blocks) = (at + length, blocks + 1);
        }
        assert!(blocks >= 2, "it has a section and an interface");
        found
    }
}

fn interface(body: &[u8]) -> String {
    // Ethernet frames, of whatever length.
    assert_eq!((half(body, 0), half(body, 2), word(body, 4)), (1, 0, 0));
    let options = options(&body[8..]);
    let value = |code| options.iter().find(|(it, _)| *it == code).map(|(_, value)| *value);
    assert_eq!(value(9), Some(&[9][..]), "times are nanoseconds");
    String::from_utf8(value(2).expect("it has a name").to_vec()).unwrap()
}

fn frame(body: &[u8]) -> CapturedFrame {
    assert_eq!(word(body, 0), 0, "the only interface");
    let (captured, original) = (word(body, 12) as usize, word(body, 16) as usize);
    assert_eq!(captured, original, "all of it");
    let options = options(&body[20 + captured.next_multiple_of(4)..]);
    let (_, flags) = options.iter().find(|(code, _)| *code == 2).expect("it has a direction");
    let sent = match word(flags, 0) & 3 {
        1 => false,
        2 => true,
        other => panic!("direction {other}"),
    };
    let time_ns = u64::from(word(body, 4)) << 32 | u64::from(word(body, 8));
    CapturedFrame { time_ns, sent, bytes: body[20..20 + captured].to_vec() }
}
