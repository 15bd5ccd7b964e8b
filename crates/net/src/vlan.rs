//! Which VLANs a port is in, and how a frame of a VLAN looks there (pure; IEEE 802.1Q).
//!
//! A port sends and receives frames of one VLAN without tags, and those of others, if any, with them. VLAN 0 stands for
//! the rack's network without any VLAN, whose frames have a tag nowhere. A frame is classified by the port that it
//! comes from, and rewritten for each port that it goes to, while it is copied there.
//!
//! Frames with a second tag behind the first are never left with that one alone: the tag that was inner would then say
//! which VLAN the frame is in, and its sender could choose one that it is not in.

use std::collections::BTreeSet;

use crate::ethernet::TAG;
use crate::offload::{NEEDS_CSUM, Offload};
use crate::port::Cause;

/// The first and the last VLAN that a port may be in (0 and 4095 have other meanings).
pub const VLANS: std::ops::RangeInclusive<u16> = 1..=4094;
/// The rack's network without a VLAN.
pub const NO_VLAN: u16 = 0;

/// Where the tag of a frame begins.
const AT: usize = 12;
const CUSTOMER: u16 = 0x8100;
const SERVICE: u16 = 0x88a8;
/// Bits of a tag that name the VLAN; the others are its priority.
const ID: u16 = 0xfff;

/// The VLANs that a port takes with tags.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Tagged {
    /// None: whatever has a tag is refused.
    None,
    /// The VLANs with these numbers, and no others.
    Listed(BTreeSet<u16>),
    /// All that the rack file names nowhere, and service tags (802.1ad).
    Unnamed,
}

/// The VLANs that a port is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VlanMembership {
    untagged: u16,
    tagged: Tagged,
}

/// The VLAN of a frame, and how it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameVlan {
    id: u16,
    tag: FrameTag,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameTag {
    None,
    /// A tag that names a priority and no VLAN; its priority bits.
    Priority(u16),
    /// A tag that names the VLAN; its priority bits, and whether another one follows.
    Vlan(u16, bool),
    /// A service tag, which is passed on as it is.
    Service,
}

/// What is done to the tag of a frame for one of its receivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rewrite {
    remove: bool,
    insert: Option<[u8; TAG]>,
}

impl VlanMembership {
    /// That of a port whose frames without tags are in `vlan`. With `vlans` it takes those with tags; without it, and
    /// without a `vlan`, a port that `may_tag` takes all that are named nowhere, and any other one none.
    pub fn new(vlan: Option<u16>, vlans: Option<&[u16]>, may_tag: bool) -> VlanMembership {
        let untagged = vlan.unwrap_or(NO_VLAN);
        let tagged = match vlans {
            Some(vlans) => {
                let listed: BTreeSet<u16> =
                    vlans.iter().copied().filter(|it| *it != untagged).collect();
                if listed.is_empty() { Tagged::None } else { Tagged::Listed(listed) }
            }
            None if may_tag && vlan.is_none() => Tagged::Unnamed,
            None => Tagged::None,
        };
        VlanMembership { untagged, tagged }
    }

    /// The VLANs that it names.
    pub fn named(&self) -> impl Iterator<Item = u16> + '_ {
        let listed = match &self.tagged {
            Tagged::Listed(listed) => Some(listed.iter().copied()),
            Tagged::None | Tagged::Unnamed => None,
        };
        listed.into_iter().flatten().chain((self.untagged != NO_VLAN).then_some(self.untagged))
    }

    /// The VLAN of its frames without tags.
    pub fn untagged(&self) -> u16 {
        self.untagged
    }

    fn takes_tags(&self) -> bool {
        self.tagged != Tagged::None
    }

    /// Whether it takes frames of a VLAN with tags; `named` are those that the rack file names.
    fn carries(&self, id: u16, named: &BTreeSet<u16>) -> bool {
        match &self.tagged {
            Tagged::None => false,
            Tagged::Listed(listed) => listed.contains(&id),
            Tagged::Unnamed => VLANS.contains(&id) && !named.contains(&id),
        }
    }

    /// Whether the port may exchange any frame with another one.
    pub fn meets(&self, other: &VlanMembership, named: &BTreeSet<u16>) -> bool {
        self.untagged == other.untagged
            || self.named().any(|id| other.is_in(id, named))
            || other.named().any(|id| self.is_in(id, named))
            || self.tagged == Tagged::Unnamed && other.tagged == Tagged::Unnamed
    }

    /// Whether the port is in a VLAN, with tags or without.
    pub fn is_in(&self, id: u16, named: &BTreeSet<u16>) -> bool {
        self.untagged == id || self.carries(id, named)
    }

    /// The VLAN of a frame at this port that begins with `head`.
    ///
    /// # Errors
    /// [`Cause::Vlan`] where the port is not in the VLAN that the frame's tag names.
    #[inline]
    pub fn classify(&self, head: &[u8], named: &BTreeSet<u16>) -> Result<FrameVlan, Cause> {
        let word = |at: usize| head.get(at..at + 2).map(|it| u16::from_be_bytes([it[0], it[1]]));
        let untagged = |tag| FrameVlan { id: self.untagged, tag };
        match word(AT) {
            Some(CUSTOMER) => {}
            Some(SERVICE) if self.tagged == Tagged::Unnamed => {
                return Ok(untagged(FrameTag::Service));
            }
            Some(SERVICE) => return Err(Cause::Vlan),
            _ => return Ok(untagged(FrameTag::None)),
        }
        let control = word(AT + 2).ok_or(Cause::Length)?;
        let (id, priority) = (control & ID, control & !ID);
        let another = matches!(word(AT + TAG), Some(CUSTOMER | SERVICE));
        match id {
            // Whoever takes it without the tag would take the second one for the first.
            0 if self.takes_tags() && !another => Ok(untagged(FrameTag::Priority(priority))),
            id if self.carries(id, named) => {
                Ok(FrameVlan { id, tag: FrameTag::Vlan(priority, another) })
            }
            _ => Err(Cause::Vlan),
        }
    }

    /// How a frame of that VLAN comes to this port; `None` where the port is not in it.
    #[inline]
    pub fn rewrite(&self, frame: &FrameVlan, named: &BTreeSet<u16>) -> Option<Rewrite> {
        let insert = |priority: u16| {
            let [kind, control] = [CUSTOMER.to_be_bytes(), (priority | frame.id).to_be_bytes()];
            Some([kind[0], kind[1], control[0], control[1]])
        };
        let with_tag = self.carries(frame.id, named);
        match frame.tag {
            FrameTag::None if frame.id == self.untagged => Some(Rewrite::default()),
            FrameTag::None => with_tag.then(|| Rewrite { remove: false, insert: insert(0) }),
            FrameTag::Service => {
                (frame.id == self.untagged && self.tagged == Tagged::Unnamed).then(Rewrite::default)
            }
            FrameTag::Priority(_) if frame.id == self.untagged => {
                Some(Rewrite { remove: !self.takes_tags(), insert: None })
            }
            FrameTag::Priority(priority) => {
                with_tag.then(|| Rewrite { remove: true, insert: insert(priority) })
            }
            FrameTag::Vlan(_, another) if frame.id == self.untagged => {
                (!another).then_some(Rewrite { remove: true, insert: None })
            }
            FrameTag::Vlan(..) => with_tag.then(Rewrite::default),
        }
    }
}

impl FrameVlan {
    /// The VLAN, 0 for the rack's network without one.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// A frame without a tag in a VLAN.
    pub fn untagged(id: u16) -> FrameVlan {
        FrameVlan { id, tag: FrameTag::None }
    }
}

impl Rewrite {
    /// Whether the frame stays as it is.
    #[inline]
    pub fn is_none(&self) -> bool {
        !self.remove && self.insert.is_none()
    }

    /// The frame that begins with `head`, as its new beginning, of which so many bytes count, and what of `head` comes
    /// behind it. `None` where it ends before its tag does.
    pub fn apply<'h>(&self, head: &'h [u8]) -> Option<([u8; AT + TAG], usize, &'h [u8])> {
        let mut begin = [0; AT + TAG];
        begin[..AT].copy_from_slice(head.get(..AT)?);
        let rest = head.get(if self.remove { AT + TAG } else { AT }..)?;
        let length = match self.insert {
            Some(tag) => {
                begin[AT..].copy_from_slice(&tag);
                AT + TAG
            }
            None => AT,
        };
        Some((begin, length, rest))
    }

    /// What is left to do to the frame, whose headers have moved.
    pub fn offload(&self, offload: &Offload) -> Offload {
        let tag = TAG as u16;
        let moved = |at: u16| match (self.remove, self.insert.is_some()) {
            (true, false) => at.saturating_sub(tag),
            (false, true) => at.saturating_add(tag),
            _ => at,
        };
        let mut it = *offload;
        if it.flags & NEEDS_CSUM != 0 {
            it.csum_start = moved(it.csum_start.get()).into();
        }
        if it.hdr_len.get() != 0 {
            it.hdr_len = moved(it.hdr_len.get()).into();
        }
        it
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(tags: &[[u16; 2]]) -> Vec<u8> {
        let mut frame = vec![2; AT];
        for [kind, control] in tags {
            frame.extend(kind.to_be_bytes());
            frame.extend(control.to_be_bytes());
        }
        frame.extend([0x88, 0xb5]);
        frame.extend([7; 40]);
        frame
    }

    /// What the frame becomes between two ports.
    fn passed(from: &VlanMembership, to: &VlanMembership, frame: &[u8]) -> Option<Vec<u8>> {
        let named: BTreeSet<u16> = from.named().chain(to.named()).collect();
        let vlan = from.classify(frame, &named).ok()?;
        let rewrite = to.rewrite(&vlan, &named)?;
        let (begin, length, rest) = rewrite.apply(frame).unwrap();
        let passed = [&begin[..length], rest].concat();
        assert!(!rewrite.is_none() || passed == frame);
        Some(passed)
    }

    #[test]
    fn a_frame_has_a_tag_where_its_receiver_takes_the_vlan_with_one() {
        let access = VlanMembership::new(Some(7), None, false);
        let trunk = VlanMembership::new(None, Some(&[7, 9]), true);
        let other = VlanMembership::new(Some(9), None, false);
        let plain = VlanMembership::new(None, None, false);
        let (none, seven) = (frame(&[]), frame(&[[CUSTOMER, 7]]));
        assert_eq!(passed(&access, &trunk, &none), Some(seven.clone()));
        assert_eq!(passed(&trunk, &access, &seven), Some(none.clone()));
        assert_eq!(passed(&trunk, &trunk, &seven), Some(seven.clone()));
        assert_eq!(passed(&trunk, &plain, &none), Some(none.clone()));
        assert_eq!(passed(&access, &other, &none), None);
        assert_eq!(passed(&trunk, &other, &seven), None);
        assert_eq!(passed(&trunk, &access, &none), None);
        assert_eq!(passed(&access, &access, &seven), None, "an access port sends no tags");
        // The priority stays with a tag.
        let urgent = frame(&[[CUSTOMER, 0xa000]]);
        let native = VlanMembership::new(Some(9), Some(&[7]), true);
        assert_eq!(passed(&native, &trunk, &urgent), Some(frame(&[[CUSTOMER, 0xa009]])));
        assert_eq!(passed(&native, &other, &urgent), Some(none));
        assert_eq!(passed(&native, &native, &urgent), Some(urgent));
    }

    #[test]
    fn a_port_that_names_none_takes_the_vlans_that_nobody_names() {
        let open = VlanMembership::new(None, None, true);
        let access = VlanMembership::new(Some(7), None, false);
        let named = access.named().collect();
        assert_eq!(open.classify(&frame(&[[CUSTOMER, 7]]), &named), Err(Cause::Vlan));
        let eight = open.classify(&frame(&[[CUSTOMER, 8]]), &named).unwrap();
        assert_eq!((eight.id(), open.rewrite(&eight, &named)), (8, Some(Rewrite::default())));
        assert!(!open.meets(&access, &named) && open.meets(&open, &named));
        let service = frame(&[[SERVICE, 7], [CUSTOMER, 7]]);
        assert_eq!(passed(&open, &open, &service), Some(service.clone()));
        let trunk = VlanMembership::new(None, Some(&[7]), true);
        assert_eq!(passed(&trunk, &open, &service), None);
        assert_eq!(passed(&open, &trunk, &service), None);
    }

    #[test]
    fn an_inner_tag_never_becomes_the_only_one() {
        let native = VlanMembership::new(Some(7), Some(&[9]), true);
        let trunk = VlanMembership::new(None, Some(&[7, 9]), true);
        let two = frame(&[[CUSTOMER, 7], [CUSTOMER, 9]]);
        assert_eq!(passed(&trunk, &native, &two), None);
        assert_eq!(passed(&trunk, &trunk, &two), Some(two));
        for ports in [&native, &trunk, &VlanMembership::new(None, None, true)] {
            for inner in [CUSTOMER, SERVICE] {
                assert_eq!(passed(ports, ports, &frame(&[[CUSTOMER, 0], [inner, 9]])), None);
            }
        }
    }

    #[test]
    fn what_is_left_to_do_moves_with_the_headers() {
        let it = Offload {
            flags: NEEDS_CSUM,
            csum_start: 34.into(),
            hdr_len: 54.into(),
            ..Offload::default()
        };
        let insert = Rewrite { remove: false, insert: Some([0x81, 0, 0, 7]) };
        let moved = insert.offload(&it);
        assert_eq!((moved.csum_start.get(), moved.hdr_len.get()), (38, 58));
        let back = Rewrite { remove: true, insert: None }.offload(&moved);
        assert_eq!(back, it);
        assert_eq!(insert.offload(&Offload::default()), Offload::default());
    }

    fn membership() -> impl Strategy<Value = VlanMembership> {
        let id = || prop::option::of(1u16..6);
        let vlans = prop::option::of(prop::collection::vec(1u16..6, 0..4));
        (id(), vlans, any::<bool>())
            .prop_map(|(vlan, vlans, may)| VlanMembership::new(vlan, vlans.as_deref(), may))
    }

    proptest! {
        /// Whatever a port sends, a receiver finds it in the VLAN that the sender is in, and would itself be allowed
        /// to send it as it came.
        #[test]
        fn no_frame_changes_its_vlan(
            from in membership(), to in membership(), others in membership(),
            tags in prop::collection::vec((prop::sample::select(vec![CUSTOMER, SERVICE]), 0u16..7), 0..3),
        ) {
            let named: BTreeSet<u16> =
                from.named().chain(to.named()).chain(others.named()).collect();
            let tags: Vec<[u16; 2]> = tags.into_iter().map(|(kind, id)| [kind, id]).collect();
            let frame = frame(&tags);
            let Ok(vlan) = from.classify(&frame, &named) else { return Ok(()) };
            prop_assert!(from.is_in(vlan.id(), &named));
            let Some(rewrite) = to.rewrite(&vlan, &named) else { return Ok(()) };
            prop_assert!(to.is_in(vlan.id(), &named) && from.meets(&to, &named));
            let (begin, length, rest) = rewrite.apply(&frame).unwrap();
            let came = [&begin[..length], rest].concat();
            let seen = to.classify(&came, &named);
            prop_assert_eq!(seen.map(|it| it.id()), Ok(vlan.id()));
            // And without its first tag, as a receiver may take it, it names no VLAN.
            if let Ok(FrameVlan { tag: FrameTag::None | FrameTag::Priority(_), .. }) = seen {
                let inner = &came[if came[AT..AT + 2] == CUSTOMER.to_be_bytes() { AT + TAG } else { AT }..];
                prop_assert!(inner[..2] == [0x88, 0xb5]);
            }
        }
    }
}
