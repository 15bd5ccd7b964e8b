//! FUSE as virtiofs speaks it: requests of a guest's kernel as values, answers as bytes.
//!
//! A request that is shorter than it should be, or names something that cannot be, is refused with
//! `EINVAL` here; what it asks for, [`state`](crate::state) judges.

/// Protocol that is answered in; the guest's kernel may speak an older minor version.
pub const MAJOR: u32 = 7;
const MINOR: u32 = 38;

/// Bytes of a request before its arguments, and of an answer before its results.
pub const REQUEST_HEAD: usize = 40;
const ANSWER_HEAD: usize = 16;

/// The longest request that is read: a write of a whole message, with room.
pub const MAX_REQUEST: usize = 128 << 10;

/// Bytes that the guest may write at once.
const MAX_WRITE: u32 = 64 << 10;
/// Pages of one request.
const MAX_PAGES: u16 = 32;
/// Mappings begin at multiples of this power of two.
const MAP_ALIGNMENT: u16 = 12;

/// Features of [`FuseOperation::Init`] that are agreed to: large writes, requests of many pages, aligned
/// mappings, and the second word of features.
const AGREED: u32 = 1 << 5 | 1 << 22 | 1 << 26 | 1 << 30;
/// Of the second word: each file says whether it is mapped directly.
const AGREED_2: u32 = 1 << 1;

/// Reading and writing this file goes past the guest's page cache.
const OPEN_DIRECT: u32 = 1;
/// Closing it asks nobody.
const OPEN_NO_FLUSH: u32 = 32;
/// The file's pages are mapped directly.
const ATTRIBUTE_DAX: u32 = 2;

/// Seconds for which attributes are kept: they never change.
const ATTRIBUTES_KEPT: u64 = 3600;

/// An error as the guest's kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// There is no such file.
    pub const NOENT: Errno = Errno(2);
    /// `EIO`: the request failed.
    pub const IO: Errno = Errno(5);
    /// There is no such handle.
    pub const BADF: Errno = Errno(9);
    /// `EAGAIN`: there is nothing now; try again.
    pub const AGAIN: Errno = Errno(11);
    /// It may not be done.
    pub const ACCES: Errno = Errno(13);
    /// The request makes no sense.
    pub const INVAL: Errno = Errno(22);
    /// There are as many as there may be.
    pub const NFILE: Errno = Errno(23);
    /// A file has no such operation.
    pub const NOTTY: Errno = Errno(25);
    /// There is no such operation.
    pub const NOSYS: Errno = Errno(38);
    /// There is no node to talk to, any more.
    pub const NOTCONN: Errno = Errno(107);
}

/// Who asks, and about which file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHead {
    /// Number of the request, which its answer repeats.
    pub unique: u64,
    /// Number of the file.
    pub node: u64,
    /// User of the process that asks, as the guest's kernel says.
    pub user: u32,
    /// Group id, in the guest.
    pub group: u32,
}

/// What the guest's kernel asks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named as in FUSE's own description")]
pub enum FuseOperation<'a> {
    /// The file system is mounted.
    Init { major: u32, minor: u32, flags_2: u32 },
    /// The file system is unmounted.
    Destroy,
    /// The file with a name.
    Lookup { name: &'a [u8] },
    /// The kernel knows files no longer: each with how many of its lookups. Not answered.
    Forget(Vec<(u64, u64)>),
    /// Asks for the attributes of the file.
    Attributes,
    /// Opens a file of the folder by its number.
    Open,
    /// Reads from a file.
    Read { handle: u64, offset: u64, size: u32 },
    /// Writes to a file.
    Write { handle: u64, offset: u64, data: &'a [u8] },
    /// Has a file do something with data, and give some back.
    Control { handle: u64, command: u32, data: &'a [u8], room: u32 },
    /// A file was closed for the last time.
    Release { handle: u64 },
    /// Something that is done by having been asked.
    Nothing,
    /// Opens the only folder, the root.
    OpenFolder,
    /// Reads the folder's entries from the one with this number.
    ReadFolder { offset: u64, size: u32 },
    /// Sizes of the file system.
    Statistics,
    /// Maps a part of a file into the window.
    SetUpMapping { offset: u64, length: u64, write: bool, at: u64 },
    /// Takes parts of the window back: where, and how long.
    RemoveMappings(Vec<(u64, u64)>),
    /// Asks to end another request early. Not answered.
    Interrupt,
    /// What is not known here.
    Unknown(u32),
}

/// The fields of a request, one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn u32(&mut self) -> Result<u32, Errno> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*field))
    }

    fn u64(&mut self) -> Result<u64, Errno> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*field))
    }

    fn skip(&mut self, bytes: usize) -> Result<(), Errno> {
        self.0 = self.0.get(bytes..).ok_or(Errno::INVAL)?;
        Ok(())
    }

    /// Takes `count` pairs of numbers, and refuses what is shorter.
    fn pairs(&mut self, count: u32) -> Result<Vec<(u64, u64)>, Errno> {
        if self.0.len() / 16 < count as usize {
            return Err(Errno::INVAL);
        }
        (0..count).map(|_| Ok((self.u64()?, self.u64()?))).collect()
    }

    fn name(&self) -> Result<&'a [u8], Errno> {
        match self.0.split_last() {
            Some((0, name)) if !name.contains(&0) => Ok(name),
            _ => Err(Errno::INVAL),
        }
    }
}

/// The head of a request; `None` when there is not even that, and nothing to answer.
pub fn head(bytes: &[u8]) -> Option<RequestHead> {
    let mut fields = Fields(bytes);
    let _length_and_operation = fields.u64().ok()?;
    let (unique, node) = (fields.u64().ok()?, fields.u64().ok()?);
    let (user, group) = (fields.u32().ok()?, fields.u32().ok()?);
    fields.skip(8).ok()?;
    Some(RequestHead { unique, node, user, group })
}

/// What a request asks.
///
/// # Errors
/// [`Errno::INVAL`] when it is none.
pub fn operation(bytes: &[u8]) -> Result<FuseOperation<'_>, Errno> {
    let mut fields = Fields(bytes);
    let (length, code) = (fields.u32()?, fields.u32()?);
    if length as usize != bytes.len() {
        return Err(Errno::INVAL);
    }
    fields.skip(REQUEST_HEAD - 8)?;
    Ok(match code {
        1 => FuseOperation::Lookup { name: fields.name()? },
        2 => {
            let node = head(bytes).ok_or(Errno::INVAL)?.node;
            FuseOperation::Forget(vec![(node, fields.u64()?)])
        }
        3 => FuseOperation::Attributes,
        14 => FuseOperation::Open,
        15 => {
            let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
            FuseOperation::Read { handle, offset, size }
        }
        16 => write(fields)?,
        17 => FuseOperation::Statistics,
        18 => FuseOperation::Release { handle: fields.u64()? },
        // To flush, to synchronise, and of the folder to close it: nothing waits anywhere.
        20 | 25 | 29 | 30 => FuseOperation::Nothing,
        26 => init(fields)?,
        27 => FuseOperation::OpenFolder,
        28 => {
            let (_handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
            FuseOperation::ReadFolder { offset, size }
        }
        36 => FuseOperation::Interrupt,
        38 => FuseOperation::Destroy,
        39 => control(fields)?,
        42 => {
            let count = fields.u32()?;
            fields.skip(4)?;
            FuseOperation::Forget(fields.pairs(count)?)
        }
        48 => {
            let (_handle, offset, length) = (fields.u64()?, fields.u64()?, fields.u64()?);
            let (flags, at) = (fields.u64()?, fields.u64()?);
            FuseOperation::SetUpMapping { offset, length, write: flags & 1 != 0, at }
        }
        49 => {
            let count = fields.u32()?;
            FuseOperation::RemoveMappings(fields.pairs(count)?)
        }
        other => FuseOperation::Unknown(other),
    })
}

fn write(mut fields: Fields<'_>) -> Result<FuseOperation<'_>, Errno> {
    let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
    // Flags, a lock's owner, flags again, and a gap.
    fields.skip(4 + 8 + 4 + 4)?;
    match fields.0.len() == size as usize {
        true => Ok(FuseOperation::Write { handle, offset, data: fields.0 }),
        false => Err(Errno::INVAL),
    }
}

fn control(mut fields: Fields<'_>) -> Result<FuseOperation<'_>, Errno> {
    let (handle, _flags, command) = (fields.u64()?, fields.u32()?, fields.u32()?);
    let (_argument, size, room) = (fields.u64()?, fields.u32()?, fields.u32()?);
    match fields.0.len() == size as usize {
        true => Ok(FuseOperation::Control { handle, command, data: fields.0, room }),
        false => Err(Errno::INVAL),
    }
}

fn init(mut fields: Fields<'_>) -> Result<FuseOperation<'_>, Errno> {
    let (major, minor) = (fields.u32()?, fields.u32()?);
    fields.skip(4)?;
    let flags = fields.u32()?;
    // Kernels before 5.17 send no second word.
    let flags_2 = if flags & 1 << 30 != 0 { fields.u32()? } else { 0 };
    Ok(FuseOperation::Init { major, minor, flags_2 })
}

/// What a file is, for its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Number of the file.
    pub node: u64,
    /// The file's size in bytes.
    pub size: u64,
    /// Kind and permissions, as in `stat(2)`.
    pub mode: u32,
    /// Names that it has: one without is gone when it is closed.
    pub links: u32,
    /// User id of the owner, in the guest.
    pub user: u32,
    /// Group id, in the guest.
    pub group: u32,
    /// Whether its pages are mapped directly.
    pub dax: bool,
}

impl Attributes {
    fn put(&self, answer: &mut Answer) {
        answer.u64s(&[self.node, self.size, self.size.div_ceil(512), 0, 0, 0]);
        let flags = if self.dax { ATTRIBUTE_DAX } else { 0 };
        let Attributes { mode, links, user, group, .. } = *self;
        answer.u32s(&[0, 0, 0, mode, links, user, group, 0, 4096, flags]);
    }
}

/// An answer that is being written.
struct Answer(Vec<u8>);

impl Answer {
    fn to(unique: u64) -> Answer {
        let mut answer = Answer(Vec::with_capacity(ANSWER_HEAD + 128));
        answer.u32s(&[0, 0]);
        answer.u64s(&[unique]);
        answer
    }

    fn u32s(&mut self, fields: &[u32]) {
        fields.iter().for_each(|field| self.0.extend(field.to_le_bytes()));
    }

    fn u64s(&mut self, fields: &[u64]) {
        fields.iter().for_each(|field| self.0.extend(field.to_le_bytes()));
    }

    fn done(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        if let Some(field) = self.0.first_chunk_mut() {
            *field = length.to_le_bytes();
        }
        self.0
    }
}

/// Done, with nothing to tell.
pub fn done(unique: u64) -> Vec<u8> {
    Answer::to(unique).done()
}

/// The answer that the request failed with `error`.
pub fn failed(unique: u64, error: Errno) -> Vec<u8> {
    let mut bytes = Answer::to(unique).done();
    if let Some(field) = bytes.get_mut(4..8) {
        field.copy_from_slice(&(-error.0).to_le_bytes());
    }
    bytes
}

/// The answer to a read.
pub fn data(unique: u64, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.0.extend(bytes);
    answer.done()
}

/// How much was written.
pub fn written(unique: u64, size: u32) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u32s(&[size, 0]);
    answer.done()
}

/// A file has done what was asked: these bytes, whose number is the result.
pub fn controlled(unique: u64, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u32s(&[u32::try_from(bytes.len()).unwrap_or(0), 0, 0, 0]);
    answer.0.extend(bytes);
    answer.done()
}

/// The file system is there, for a kernel that speaks the protocol up to `minor`.
pub fn ready(unique: u64, minor: u32, flags_2: u32) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u32s(&[MAJOR, minor.min(MINOR), 0, AGREED]);
    // At most so many requests in the background, and when that is crowded.
    answer.u32s(&[64 | 48 << 16, MAX_WRITE, 1]);
    answer.u32s(&[u32::from(MAX_PAGES) | u32::from(MAP_ALIGNMENT) << 16, flags_2 & AGREED_2]);
    answer.u32s(&[0; 7]);
    answer.done()
}

/// A file that was looked for. The kernel is to ask anew each time, and to release it when it is closed.
pub fn entry(unique: u64, attributes: &Attributes) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u64s(&[attributes.node, 0, 0, ATTRIBUTES_KEPT]);
    answer.u32s(&[0, 0]);
    attributes.put(&mut answer);
    answer.done()
}

/// The answer that has a file's attributes.
pub fn attributes(unique: u64, attributes: &Attributes) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u64s(&[ATTRIBUTES_KEPT]);
    answer.u32s(&[0, 0]);
    attributes.put(&mut answer);
    answer.done()
}

/// A file is open, as `handle`.
pub fn opened(unique: u64, handle: u64, dax: bool) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u64s(&[handle]);
    answer.u32s(&[if dax { OPEN_NO_FLUSH } else { OPEN_DIRECT | OPEN_NO_FLUSH }, 0]);
    answer.done()
}

/// Entries of the folder, as many as there is room for: each with its number and whether it is a folder.
pub fn entries(unique: u64, list: &[(u64, &str, bool)], from: u64, room: u32) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    let first = usize::try_from(from).unwrap_or(usize::MAX);
    for (at, (node, name, folder)) in list.iter().enumerate().skip(first) {
        let length = (24 + name.len()).next_multiple_of(8);
        if answer.0.len() - ANSWER_HEAD + length > room as usize {
            break;
        }
        answer.u64s(&[*node, at as u64 + 1]);
        answer.u32s(&[name.len() as u32, if *folder { 4 } else { 8 }]);
        answer.0.extend(name.as_bytes());
        answer.0.resize(answer.0.len().next_multiple_of(8), 0);
    }
    answer.done()
}

/// Sizes of the file system: it has no blocks, and short names.
pub fn statistics(unique: u64) -> Vec<u8> {
    let mut answer = Answer::to(unique);
    answer.u64s(&[0; 5]);
    answer.u32s(&[4096, 64, 4096, 0]);
    answer.u32s(&[0; 6]);
    answer.done()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(code: u32, arguments: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(((REQUEST_HEAD + arguments.len()) as u32).to_le_bytes());
        bytes.extend(code.to_le_bytes());
        for field in [7_u64, 9] {
            bytes.extend(field.to_le_bytes());
        }
        for field in [1000_u32, 100, 4711, 0] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(arguments);
        bytes
    }

    fn words(fields: &[u64]) -> Vec<u8> {
        fields.iter().flat_map(|field| field.to_le_bytes()).collect()
    }

    #[test]
    fn requests_are_what_they_say_or_none() {
        let lookup = request(1, b"session\0");
        assert_eq!(head(&lookup), Some(RequestHead { unique: 7, node: 9, user: 1000, group: 100 }));
        assert_eq!(operation(&lookup), Ok(FuseOperation::Lookup { name: b"session" }));
        let map = request(48, &words(&[3, 0, 2 << 20, 3, 4 << 20]));
        let set_up =
            FuseOperation::SetUpMapping { offset: 0, length: 2 << 20, write: true, at: 4 << 20 };
        assert_eq!(operation(&map), Ok(set_up));
        let mut removal = 2_u32.to_le_bytes().to_vec();
        removal.extend(words(&[0, 1, 2, 3]));
        let removal = request(49, &removal);
        let removed = operation(&removal);
        assert_eq!(removed, Ok(FuseOperation::RemoveMappings(vec![(0, 1), (2, 3)])));
        let mut control = words(&[3, 77 << 32, 0, 2 | 64 << 32]);
        control.extend(b"ab");
        let controlled = FuseOperation::Control { handle: 3, command: 77, data: b"ab", room: 64 };
        assert_eq!(operation(&request(39, &control)), Ok(controlled));
        assert_eq!(operation(&request(2, &words(&[5]))), Ok(FuseOperation::Forget(vec![(9, 5)])));
        for wrong in [
            request(1, b"no end"),
            request(1, b"two\0names\0"),
            request(15, &words(&[1, 2])),
            request(16, &words(&[1, 2, 100, 0, 0])),
            request(39, &words(&[1, 2, 3, 1 | 64 << 32])),
            request(42, &words(&[u64::from(u32::MAX), 1])),
            request(49, &words(&[9])),
        ] {
            assert_eq!(operation(&wrong), Err(Errno::INVAL), "{wrong:?}");
        }
        let mut longer = lookup.clone();
        longer.push(0);
        assert_eq!(operation(&longer), Err(Errno::INVAL));
    }

    #[test]
    fn answers_have_the_lengths_that_the_kernel_expects() {
        let attributes_of = Attributes {
            node: 2,
            size: 100,
            mode: 0o100_600,
            links: 0,
            user: 1,
            group: 2,
            dax: true,
        };
        let body = |bytes: Vec<u8>| bytes.len() - ANSWER_HEAD;
        assert_eq!(body(ready(1, 36, u32::MAX)), 64);
        assert_eq!(body(entry(1, &attributes_of)), 128);
        assert_eq!(body(attributes(1, &attributes_of)), 104);
        assert_eq!(body(opened(1, 2, true)), 16);
        assert_eq!(body(written(1, 2)), 8);
        assert_eq!(body(controlled(1, b"four")), 16 + 4);
        assert_eq!(body(statistics(1)), 80);
        let list = [(1, ".", true), (2, "session", false)];
        assert_eq!(body(entries(1, &list, 0, 4096)), 32 + 32);
        assert_eq!(body(entries(1, &list, 1, 32)), 32);
        assert_eq!(body(entries(1, &list, 1, 31)), 0);
        assert_eq!(failed(1, Errno::NOENT)[4..8], (-2_i32).to_le_bytes());
    }

    proptest! {
        #[test]
        fn no_request_makes_it_fail(code in 0_u32..64, rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = operation(&request(code, &rest));
            let _ = (operation(&rest), head(&rest));
        }
    }
}
