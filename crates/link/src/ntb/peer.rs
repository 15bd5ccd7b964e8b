//! Who is at the other end of an NTB: whether that is the host for which this end is, as far as its header says (pure).
//!
//! A cable may lead to another machine than the rack file says. Nothing is proved by it: who has the cable can store these
//! words, too.

use super::layout::{ArenaLayout, MAGIC, header, is_magic};

/// Who the two ends of an NTB take themselves and each other for, as far as it fits into their headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndNames {
    /// What this end says.
    own: [u32; 2],
    /// What its peer has to say.
    peer: [u32; 2],
}

impl EndNames {
    /// Of `host` in `rack`, whose peer is to be the host `peer`.
    pub fn new(rack: &str, host: &str, peer: &str) -> EndNames {
        let digest = |from: &str, to: &str| {
            // Names of racks and hosts have no zero bytes.
            let bytes = rackbus_identity::digest([rack, from, to].join("\0").as_bytes());
            let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
            // 0 is what nobody has stored yet.
            [word(0).max(1), word(4).max(1)]
        };
        EndNames { own: digest(host, peer), peer: digest(peer, host) }
    }

    /// What this end says.
    pub(super) fn own(&self) -> [u32; 2] {
        self.own
    }

    /// Whether the header that `load` reads is the peer's; false where it was not stored yet, or not whole.
    ///
    /// # Errors
    /// [`PeerMismatch`], when it is somebody else's.
    pub(super) fn is_peer(
        &self,
        layout: ArenaLayout,
        load: impl Fn(u32) -> u32,
    ) -> Result<bool, PeerMismatch> {
        let magic = load(header::MAGIC);
        if magic != MAGIC {
            let version = PeerMismatch::Version(magic & 0xff);
            return if is_magic(magic) { Err(version) } else { Ok(false) };
        }
        let [shape, names @ ..] = [header::SHAPE, header::NAMES, header::NAMES + 4].map(load);
        match names {
            _ if shape == 0 || names.contains(&0) => Ok(false),
            _ if shape != layout.shape() => Err(PeerMismatch::Layout),
            _ if names != self.peer => Err(PeerMismatch::Names),
            _ => Ok(true),
        }
    }
}

/// Why nothing is said to whoever stores at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PeerMismatch {
    /// Its node has another version of the link, with this number.
    #[error("its node speaks version {0} of this link, and this one version {own}: run the same release on both", own = MAGIC as u8)]
    Version(u32),
    /// It takes the windows for other sizes.
    #[error("its node lays out the windows in another way: run the same release on both")]
    Layout,
    /// It is another host, of another rack, or takes this one for another host.
    #[error(
        "the NTB leads to another host or another rack's: compare [hosts.HOST.ntb] of both rack files with the cables"
    )]
    Names,
}
