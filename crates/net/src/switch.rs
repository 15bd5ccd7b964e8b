//! Who receives a frame, and whether its sender may send it (pure).
//!
//! The stations of the rack are known from its file, so nothing is flooded but what is for a group. A station
//! sends from its own Ethernet address only. Where the rack file says so of a function, it
//! also uses its own IP addresses only, in what it says of itself by ARP and neighbour discovery as well. What is
//! for nobody in the rack goes to its uplink, where there is one.
//!
//! Where the rack file allows a station other addresses, of a bridge behind it, these are
//! [learned](crate::learning), and those outside as well; what is for an address that nobody knows is flooded then, to
//! such stations and to the uplink. A frame stays in its [VLAN](crate::vlan).

mod claims;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::address::MacAddress;
use crate::addressing::{Station, StationKind};
use crate::ipv6;
use crate::learning::{AddressLimit, LearningTable};
use crate::mtu::longest_packet;
use crate::neighbours::{KnownAddresses, NeighbourQuestion};
use crate::offload::{GSO_NONE, NEEDS_CSUM, Offload};
use crate::port::{Cause, MAX_FRAME, MIN_FRAME};
use crate::vlan::{FrameVlan, Rewrite, VlanMembership};

use claims::{is_icmp, own_ipv4};

/// Bytes at the beginning of a frame that decisions are made by, where its headers end there; whoever sends what a
/// guest can change reads them once, and sends what was looked at.
pub const HEAD: usize = 128;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const VLAN: [u16; 2] = [0x8100, 0x88a8];

/// Groups that a bridge keeps to itself (IEEE 802.1Q, table 8-1): 01:80:c2:00:00:00 to 0f.
const LINK_LOCAL_GROUPS: [u8; 5] = [0x01, 0x80, 0xc2, 0, 0];

/// Who receives a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameTarget {
    /// The station of this number.
    Station(usize),
    /// All stations but the sender that are [in its VLAN](StationSwitch::heard_as).
    All,
    /// The first of the [uplinks](StationSwitch::uplinks) that works.
    Outside,
    /// All stations with other addresses than their own behind them that are in its VLAN, and the uplink.
    Flood,
}

/// Addresses outside that are known at the same time.
const OUTSIDE_ADDRESSES: usize = 4096;

/// The stations of a rack, and what each may do.
#[derive(Debug)]
pub struct StationSwitch {
    members: Vec<Member>,
    /// Their addresses, in order.
    by_mac: Vec<(MacAddress, usize)>,
    by_ip: KnownAddresses,
    mtu: usize,
    flood_limit: u64,
    /// Who receives what is for nobody in the rack, the first that works.
    uplinks: Vec<usize>,
    /// The VLANs that the rack file names.
    named: BTreeSet<u16>,
    /// Addresses that are no stations', where the rack file allows any: by station, and behind these, outside.
    learned: Option<Mutex<LearningTable>>,
}

#[derive(Debug)]
struct Member {
    mac: MacAddress,
    /// The addresses that it may use, where it may not use any.
    bound: Option<(Ipv4Addr, Ipv6Addr)>,
    vlans: VlanMembership,
    /// Other addresses may be behind it.
    has_others: bool,
    is_uplink: bool,
}

impl StationSwitch {
    /// The switch of these stations, whose IP packets are of up to `mtu` bytes, and each of whose queues may send
    /// `flood_limit` frames for many in a second. An uplink sends from any address that
    /// is no station's.
    pub fn new(stations: &[Station], mtu: u16, flood_limit: u64) -> StationSwitch {
        let member = |it: &Station| Member {
            mac: it.mac,
            bound: it.anti_spoofing.then_some((it.ipv4, it.ipv6)),
            vlans: it.membership(),
            has_others: it.learned_addresses > 0,
            is_uplink: it.kind == StationKind::Uplink,
        };
        let members: Vec<Member> = stations.iter().map(member).collect();
        let mut by_mac: Vec<_> =
            members.iter().enumerate().map(|(nth, it)| (it.mac, nth)).collect();
        by_mac.sort_unstable();
        let uplinks = (0..members.len()).filter(|nth| members[*nth].is_uplink).collect();
        let named = members.iter().flat_map(|it| it.vlans.named()).collect();
        let learned = members.iter().any(|it| it.has_others).then(|| {
            let of = |it: &Station| AddressLimit { most: it.learned_addresses, replaces: false };
            let outside = AddressLimit { most: OUTSIDE_ADDRESSES, replaces: true };
            Mutex::new(LearningTable::new(stations.iter().map(of).chain([outside])))
        });
        let (by_ip, mtu) = (KnownAddresses::of(stations), mtu.into());
        StationSwitch { members, by_mac, by_ip, mtu, flood_limit, uplinks, named, learned }
    }

    /// Whether two stations have a VLAN in common, and may have a ring between them. Uplinks have, to know of each
    /// other.
    pub fn may_meet(&self, one: usize, other: usize) -> bool {
        let [one, other] = [one, other].map(|it| &self.members[it]);
        one.is_uplink && other.is_uplink || one.vlans.meets(&other.vlans, &self.named)
    }

    /// The stations that lead outside, the one to use first.
    pub fn uplinks(&self) -> &[usize] {
        &self.uplinks
    }

    /// Whether an address is a station's.
    pub fn is_station(&self, mac: MacAddress) -> bool {
        self.station_of(mac).is_some()
    }

    /// How many stations there are.
    pub fn stations(&self) -> usize {
        self.members.len()
    }

    /// The address of a station.
    pub fn mac(&self, station: usize) -> MacAddress {
        self.members[station].mac
    }

    /// Frames for many that each queue of a station may send in a second.
    pub fn flood_limit(&self) -> u64 {
        self.flood_limit
    }

    /// The longest IP packet.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    /// How `station` hears what `from` sends to a group in a VLAN; `None` where it does not.
    pub fn heard_as(&self, station: usize, from: usize, vlan: &FrameVlan) -> Option<Rewrite> {
        let both_lead_outside = self.members[station].is_uplink && self.members[from].is_uplink;
        if station == from || both_lead_outside {
            return None;
        }
        self.rewrite(station, vlan)
    }

    /// How a frame of a VLAN comes to `station`; `None` where that is not in it.
    #[inline]
    pub fn rewrite(&self, station: usize, vlan: &FrameVlan) -> Option<Rewrite> {
        self.members[station].vlans.rewrite(vlan, &self.named)
    }

    /// Whether other addresses than its own may be behind a station: it hears what is for nobody else.
    pub fn has_others(&self, station: usize) -> bool {
        self.members[station].has_others
    }

    /// Whether addresses that are no stations' may be in the rack.
    pub fn learns(&self) -> bool {
        self.learned.is_some()
    }

    /// The addresses other than its own that are behind a station at `now_ns`, with their VLANs.
    pub fn behind(&self, station: usize, now_ns: u64) -> Vec<(u16, MacAddress)> {
        self.table().map_or_else(Vec::new, |table| table.behind(now_ns, station))
    }

    /// Nobody is behind a station any more.
    pub fn forget(&self, station: usize) {
        if let Some(mut table) = self.table().filter(|_| !self.members[station].is_uplink) {
            table.forget(station);
        }
    }

    /// The addresses that are in the rack at `now_ns`, each with what its frames become outside; without those in
    /// VLANs that `uplink` does not have.
    pub fn seen_outside(&self, uplink: usize, now_ns: u64) -> Vec<(MacAddress, Rewrite)> {
        let members = self.members.iter().enumerate().filter(|(_, it)| !it.is_uplink);
        let all = members.flat_map(|(nth, it)| {
            let others = self.behind(nth, now_ns);
            std::iter::once((it.vlans.untagged(), it.mac)).chain(others)
        });
        let outside = |(vlan, mac): (u16, MacAddress)| {
            Some((mac, self.rewrite(uplink, &FrameVlan::untagged(vlan))?))
        };
        all.filter_map(outside).collect()
    }

    /// Whether a frame that came by `uplink` at `now_ns` and begins with `head` is for an address that is known to be in
    /// the rack, and not for one that nobody knows.
    pub fn is_known_inside(&self, uplink: usize, head: &[u8], now_ns: u64) -> bool {
        let (Some(header), Ok(vlan)) =
            (Header::of(head), self.members[uplink].vlans.classify(head, &self.named))
        else {
            return false;
        };
        let learned = || self.table()?.find(now_ns, (vlan.id(), header.to));
        let place = self.station_of(header.to).or_else(learned);
        place.and_then(|at| self.members.get(at)).is_some_and(|it| !it.is_uplink)
    }

    fn table(&self) -> Option<MutexGuard<'_, LearningTable>> {
        // Each change of it is whole before anything can fail.
        Some(self.learned.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Who receives a frame of `length` bytes that `from` sends at `now_ns` and that begins with `head`: all of it, or
    /// its first [`HEAD`] bytes if its headers end there. And its VLAN.
    ///
    /// # Errors
    /// Why nobody does.
    pub fn decide(
        &self,
        from: usize,
        offload: &Offload,
        head: &[u8],
        length: usize,
        now_ns: impl Fn() -> u64,
    ) -> Result<(FrameTarget, FrameVlan), Cause> {
        let header = Header::of(head).filter(|_| length <= MAX_FRAME).ok_or(Cause::Length)?;
        self.check_size(offload, &header, head, length)?;
        self.check_checksum(from, offload, &header, head)?;
        let vlan = self.members[from].vlans.classify(head, &self.named)?;
        self.check_source(from, vlan.id(), &header, head, &now_ns)?;
        if header.to.is_group() {
            let link_local = header.to.0[..5] == LINK_LOCAL_GROUPS && header.to.0[5] < 16;
            return if link_local { Err(Cause::Unknown) } else { Ok((FrameTarget::All, vlan)) };
        }
        let target = match self.station_of(header.to) {
            Some(station) if station == from => return Err(Cause::Unknown),
            Some(station) => FrameTarget::Station(station),
            None => self.not_a_station(from, header.to, &vlan, now_ns)?,
        };
        match target {
            FrameTarget::Station(to) if self.rewrite(to, &vlan).is_none() => Err(Cause::Vlan),
            target => Ok((target, vlan)),
        }
    }

    /// The answer to a frame of `from` for many, as `from` takes it, which begins with `head` and is in `vlan`: where that asks who has an
    /// address of another station in its VLAN. `None` for all else, which those that it is for are to hear.
    pub fn answer(&self, from: usize, vlan: &FrameVlan, head: &[u8]) -> Option<Vec<u8>> {
        // Outside is another network, which has to hear where stations are from themselves.
        if self.members[from].is_uplink {
            return None;
        }
        let question = NeighbourQuestion::read(head)?;
        let owner = self.by_ip.owner(question.about()).filter(|owner| *owner != from)?;
        let there = &self.members[owner];
        // It has its addresses in one VLAN.
        if there.vlans.untagged() != vlan.id() {
            return None;
        }
        let answer = question.answer(there.mac);
        let rewrite = self.rewrite(from, &FrameVlan::untagged(vlan.id()))?;
        let (begin, length, rest) = rewrite.apply(&answer)?;
        Some([&begin[..length], rest].concat())
    }

    /// Who receives a frame for an address that is no station's.
    fn not_a_station(
        &self,
        from: usize,
        to: MacAddress,
        vlan: &FrameVlan,
        now_ns: impl Fn() -> u64,
    ) -> Result<FrameTarget, Cause> {
        let outside = !self.members[from].is_uplink && !self.uplinks.is_empty();
        let carried = self.uplinks.first().is_some_and(|it| self.rewrite(*it, vlan).is_some());
        if let Some(table) = self.table() {
            return match table.find(now_ns(), (vlan.id(), to)) {
                Some(station) if station == from => Err(Cause::Unknown),
                Some(station) if station < self.members.len() => Ok(FrameTarget::Station(station)),
                Some(_) if outside && carried => Ok(FrameTarget::Outside),
                Some(_) => Err(Cause::Unknown),
                None => Ok(FrameTarget::Flood),
            };
        }
        match outside {
            true if carried => Ok(FrameTarget::Outside),
            true => Err(Cause::Vlan),
            false => Err(Cause::Unknown),
        }
    }

    /// Whether `from` may have sent a frame that begins with `head`, for `to`, at `now_ns`.
    ///
    /// # Errors
    /// What it may not have.
    #[inline]
    pub fn check_arrival(
        &self,
        (from, to): (usize, usize),
        head: &[u8],
        now_ns: impl Fn() -> u64,
    ) -> Result<(), Cause> {
        let source = head.get(6..12).and_then(|it| it.try_into().ok()).ok_or(Cause::Length)?;
        let vlan = self.members[to].vlans.classify(head, &self.named)?;
        if !self.members[from].vlans.is_in(vlan.id(), &self.named) {
            return Err(Cause::Vlan);
        }
        self.check_address(from, vlan.id(), MacAddress(source), now_ns)
    }

    /// Whether `from` may send from an address.
    #[inline]
    fn check_address(
        &self,
        from: usize,
        vlan: u16,
        source: MacAddress,
        now_ns: impl Fn() -> u64,
    ) -> Result<(), Cause> {
        let own = &self.members[from];
        if own.mac == source {
            return Ok(());
        }
        let may = own.is_uplink || own.has_others;
        if !may || !source.is_station() || self.station_of(source).is_some() {
            return Err(Cause::Spoofed);
        }
        let Some(mut table) = self.table() else { return Ok(()) };
        let port = if own.is_uplink { self.members.len() } else { from };
        table.learn(now_ns(), (vlan, source), port).map_err(|_| Cause::Spoofed)
    }

    fn station_of(&self, mac: MacAddress) -> Option<usize> {
        let place = self.by_mac.binary_search_by_key(&mac, |(mac, _)| *mac).ok()?;
        Some(self.by_mac[place].1)
    }

    fn check_size(
        &self,
        offload: &Offload,
        header: &Header,
        head: &[u8],
        length: usize,
    ) -> Result<(), Cause> {
        if !offload.is_sound(length) {
            return Err(Cause::Offload);
        }
        let packet = head.get(header.network..).unwrap_or_default();
        let bytes = length.saturating_sub(header.network);
        match longest_packet(header.kind, packet, bytes, offload) <= self.mtu {
            true => Ok(()),
            false if offload.gso_type == GSO_NONE => Err(Cause::Length),
            false => Err(Cause::Offload),
        }
    }

    /// A checksum that is still to be written must not change what is decided by: addresses, tags, and what functions say
    /// of themselves. Its sender chooses the value.
    fn check_checksum(
        &self,
        from: usize,
        offload: &Offload,
        header: &Header,
        head: &[u8],
    ) -> Result<(), Cause> {
        if offload.flags & NEEDS_CSUM == 0 {
            return Ok(());
        }
        let start = usize::from(offload.csum_start.get()).checked_sub(header.network);
        let start = start.ok_or(Cause::Offload)?;
        let packet = head.get(header.network..).unwrap_or_default();
        let bound = self.members[from].bound.is_some();
        let behind_all = match header.kind {
            IPV4 => start >= 20,
            IPV6 if bound => match ipv6::upper(packet) {
                Some(upper) if is_icmp(&upper) => {
                    start == upper.at && offload.csum_offset.get() == 2
                }
                // Before it could change which protocol the headers say comes next.
                Some(upper) => start >= upper.at,
                None => false,
            },
            IPV6 => start >= ipv6::HEADER,
            ARP => false,
            _ => true,
        };
        if behind_all { Ok(()) } else { Err(Cause::Offload) }
    }

    fn check_source(
        &self,
        from: usize,
        vlan: u16,
        header: &Header,
        head: &[u8],
        now_ns: impl Fn() -> u64,
    ) -> Result<(), Cause> {
        self.check_address(from, vlan, header.from, now_ns)?;
        let Some((ipv4, ipv6)) = self.members[from].bound else { return Ok(()) };
        let packet = head.get(header.network..).unwrap_or_default();
        let honest = match header.kind {
            IPV4 => own_ipv4(packet, 12, ipv4),
            // Hardware and protocol addresses of Ethernet and IPv4, which are all there are.
            ARP => {
                packet.starts_with(&[0, 1, 8, 0, 6, 4])
                    && packet.get(8..14) == Some(&header.from.0)
                    && own_ipv4(packet, 14, ipv4)
            }
            IPV6 => {
                self.is_own_ipv6(from, packet, 8, ipv6) && self.is_honest_icmp(from, packet, ipv6)
            }
            // What is behind more tags than are looked at.
            kind => !VLAN.contains(&kind),
        };
        if honest { Ok(()) } else { Err(Cause::Spoofed) }
    }
}

/// What of a frame's headers decides where it goes.
struct Header {
    to: MacAddress,
    from: MacAddress,
    kind: u16,
    /// Where the packet begins.
    network: usize,
}

impl Header {
    /// `None` when the frame ends before its header does.
    fn of(head: &[u8]) -> Option<Header> {
        let mac = |at: usize| Some(MacAddress(head.get(at..at + 6)?.try_into().ok()?));
        let word = |at: usize| Some(u16::from_be_bytes(head.get(at..at + 2)?.try_into().ok()?));
        let (mut kind, mut network) = (word(12)?, MIN_FRAME);
        let mut tags = 0;
        while VLAN.contains(&kind) && tags < 2 {
            (kind, network, tags) = (word(network + 2)?, network + 4, tags + 1);
        }
        Some(Header { to: mac(0)?, from: mac(6)?, kind, network })
    }
}

#[cfg(test)]
mod tests;
