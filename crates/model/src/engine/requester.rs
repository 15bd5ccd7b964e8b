//! What makes requests: a device's DMA engine, an NTB's, a processor. It cuts reads and writes into
//! packets, keeps to its tags, and lets its streams (queue pairs, channels) take turns packet by
//! packet, as devices commonly do (Accelerator-as-a-Service, observation 4).

use std::collections::VecDeque;

use crate::time::Time;

use super::job::Until;
use super::{
    Event, NONE, PacketClass, PartId, Request, RequesterId, RouteId, StreamId, Tlp, World,
};

/// What a requester is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequesterParameters {
    /// The most bytes of a write (MPS), a power of two; writes end at multiples of it.
    pub payload: u32,
    /// The most bytes of a read request (MRRS), a power of two; requests end at multiples of it.
    pub read: u32,
    /// Read requests under way at a time.
    pub tags: u32,
    /// Packets that may wait for the first link: a processor's buffers, a device's output queue.
    pub window: u32,
    /// The least time between two packets: a processor filling a write-combining buffer.
    pub gap: Time,
    /// The same after each packet of a write, where that is longer.
    pub write_gap: Time,
    /// What comes to the gap after the last packet of a write.
    pub write_setup: Time,
    /// Where not 0: requests of a read from an address that is no multiple of this are cut at every
    /// multiple of it, as Marlin's measurements suggest (2014, section 5.3).
    pub alignment: u32,
    /// Bytes that a stream may ask for or send before it is another's turn; 0 is one packet.
    pub turn: u32,
    /// Bytes per second that it moves at most in all its streams; reads count when they are asked for.
    pub engine: Option<u64>,
}

impl Default for RequesterParameters {
    fn default() -> Self {
        RequesterParameters {
            payload: 256,
            read: 512,
            tags: 32,
            window: 2,
            gap: Time::ZERO,
            write_gap: Time::ZERO,
            write_setup: Time::ZERO,
            alignment: 0,
            turn: 0,
            engine: None,
        }
    }
}

impl RequesterParameters {
    /// The least time after a packet of its, a write's or a read's; `last` is whether it ends the write.
    pub fn gap_after(&self, write: bool, last: bool) -> Time {
        let setup = if last { self.write_setup } else { Time::ZERO };
        if write { self.gap.max(self.write_gap) + setup } else { self.gap }
    }
}

#[derive(Debug)]
pub(super) struct PacketRequester {
    part: u32,
    parameters: RequesterParameters,
    tags: u32,
    /// Its packets that wait for their first link.
    waiting: u32,
    /// When it may make its next packet.
    next: Time,
    timer: bool,
    streams: Vec<Stream>,
    /// Streams that have something to do, the next one first.
    turns: VecDeque<u32>,
    /// Bytes that are left of the first one's turn.
    turn: u64,
    /// Since when reads wait for a tag, or [`Time::MAX`], and how long they did.
    starved_since: Time,
    starved: Time,
    /// How long the gaps before its packets were, all together.
    paced: Time,
    /// Bytes of its packets, and of what its reads asked for, since measuring began.
    moved: u64,
}

#[derive(Debug, Default)]
struct Stream {
    reads: VecDeque<u32>,
    writes: VecDeque<u32>,
    /// Whether its last packet was a write.
    wrote: bool,
    /// Writes that their jobs do not wait for: what such a job asks for next must not pass them.
    unawaited: u32,
    /// Whether it is among the turns.
    listed: bool,
}

impl PacketRequester {
    pub(super) fn memory(&self) -> usize {
        let queued = |stream: &Stream| stream.reads.capacity() + stream.writes.capacity();
        let queues = self.streams.iter().map(queued).sum::<usize>() + self.turns.capacity();
        queues * size_of::<u32>() + self.streams.capacity() * size_of::<Stream>()
    }

    pub(super) fn is_whole(&self) -> bool {
        self.tags == self.parameters.tags && self.waiting == 0 && self.turns.is_empty()
    }
}

/// A read or write of any length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Op {
    requester: u32,
    stream: u32,
    write: bool,
    route: u32,
    address: u64,
    /// Where a read begins that misses the requester's alignment.
    unaligned: Option<u64>,
    /// Bytes not yet asked for or sent.
    left: u64,
    /// Of these, what can be sent: a copy's writes wait for what is read.
    available: u64,
    /// Bytes of a read that have not come.
    missing: u64,
    /// The write that a copy's read feeds, or [`NONE`].
    feeds: u32,
    /// The flow that it belongs to.
    pub(super) flow: u32,
    /// The job that waits for it, or [`NONE`].
    job: u32,
    until: Until,
}

impl Op {
    fn is_unawaited(&self) -> bool {
        self.write && self.until != Until::Landed
    }

    /// Takes what its next packet carries or asks for: that packet's address and bytes.
    fn take(&mut self, parameters: &RequesterParameters) -> (u64, u64) {
        let address = self.address;
        let most = match (self.write, self.unaligned) {
            (true, _) => upto(parameters.payload, address),
            (false, None) => upto(parameters.read, address),
            (false, Some(begin)) => {
                upto(parameters.read, address - begin).min(upto(parameters.alignment, address))
            }
        };
        let bytes = self.left.min(u64::from(most));
        self.left -= bytes;
        self.address += bytes;
        self.available -= if self.write { bytes } else { 0 };
        (address, bytes)
    }
}

/// Whose an operation is: its flow, the job that waits for it or [`NONE`], and till when.
pub(super) type For = (u32, u32, Until);

/// How far it is from an address to the next multiple of `most`, a power of two.
pub(super) fn upto(most: u32, address: u64) -> u32 {
    debug_assert!(most.is_power_of_two(), "{most} is no power of two");
    most - (address as u32 & (most - 1))
}

impl World {
    /// Adds a requester at a part.
    pub fn add_requester(&mut self, at: PartId, parameters: RequesterParameters) -> RequesterId {
        self.requesters.push(PacketRequester {
            part: at.0,
            parameters,
            tags: parameters.tags,
            waiting: 0,
            next: Time::ZERO,
            timer: false,
            streams: Vec::new(),
            turns: VecDeque::new(),
            turn: u64::from(parameters.turn),
            starved_since: Time::MAX,
            starved: Time::ZERO,
            paced: Time::ZERO,
            moved: 0,
        });
        RequesterId((self.requesters.len() - 1) as u32)
    }

    /// The share of the measured time in which reads of a requester waited for a tag.
    pub fn starved_share(&self, requester: RequesterId) -> f64 {
        let here = &self.requesters[requester.index()];
        self.share(here.starved + self.now.since(here.starved_since.max(self.measured_from)))
    }

    /// The share of the measured time that were gaps before a requester's packets.
    pub fn paced_share(&self, requester: RequesterId) -> f64 {
        self.share(self.requesters[requester.index()].paced)
    }

    /// The share of what a requester's engine can move that it moved since measuring began; `None` when
    /// only the link bounds it.
    pub fn engine_share(&self, requester: RequesterId) -> Option<f64> {
        let here = &self.requesters[requester.index()];
        let rate = here.parameters.engine? as f64;
        Some(self.share(Time::from_ps((here.moved as f64 / rate * 1e12) as u64)))
    }

    /// Adds a stream to a requester.
    pub fn add_stream(&mut self, requester: RequesterId) -> StreamId {
        let streams = &mut self.requesters[requester.index()].streams;
        streams.push(Stream::default());
        self.streams.push((requester.0, (streams.len() - 1) as u32));
        StreamId((self.streams.len() - 1) as u32)
    }

    /// The requester of a stream.
    pub fn requester_of(&self, stream: StreamId) -> RequesterId {
        RequesterId(self.streams[stream.index()].0)
    }

    /// What a requester is like, and the part where it is.
    pub fn requester(&self, requester: RequesterId) -> (&RequesterParameters, PartId) {
        let here = &self.requesters[requester.index()];
        (&here.parameters, PartId(here.part))
    }

    /// All requesters, in the order in which they were added.
    pub fn requester_ids(&self) -> impl ExactSizeIterator<Item = RequesterId> {
        (0..self.requesters.len() as u32).map(RequesterId)
    }

    /// The part where a stream's requests begin.
    pub fn part_of_stream(&self, stream: StreamId) -> PartId {
        PartId(self.requesters[self.streams[stream.index()].0 as usize].part)
    }

    /// Begins a read or write; `job` goes on when it has come as far as `until` says.
    pub(super) fn begin(
        &mut self,
        (stream, route): (StreamId, RouteId),
        write: bool,
        address: u64,
        bytes: u64,
        whose: For,
    ) {
        let op = self.new_op(stream, route, write, address, bytes, whose);
        self.submit(op);
    }

    /// Begins a copy: what is read by one way is written by another, as it comes.
    pub(super) fn begin_copy(
        &mut self,
        stream: StreamId,
        (from, to): (RouteId, RouteId),
        (source, target): (u64, u64),
        bytes: u64,
        whose: For,
    ) {
        let write = self.new_op(stream, to, true, target, bytes, whose);
        self.ops[write].available = 0;
        let read = self.new_op(stream, from, false, source, bytes, (whose.0, NONE, Until::Begun));
        self.ops[read].feeds = write;
        self.submit(write);
        self.submit(read);
    }

    fn new_op(
        &mut self,
        stream: StreamId,
        route: RouteId,
        write: bool,
        address: u64,
        bytes: u64,
        (flow, job, until): For,
    ) -> u32 {
        let (requester, stream) = self.streams[stream.index()];
        let alignment = self.requesters[requester as usize].parameters.alignment;
        self.ops.put(Op {
            requester,
            stream,
            write,
            route: route.0,
            address,
            unaligned: Some(address)
                .filter(|_| alignment != 0 && !address.is_multiple_of(u64::from(alignment))),
            left: bytes,
            available: bytes,
            missing: if write { 0 } else { bytes },
            feeds: NONE,
            flow,
            job,
            until,
        })
    }

    fn submit(&mut self, id: u32) {
        let op = &self.ops[id];
        let (requester, stream) = (op.requester, op.stream);
        let queues = &mut self.requesters[requester as usize].streams[stream as usize];
        queues.unawaited += u32::from(op.is_unawaited());
        if op.write { &mut queues.writes } else { &mut queues.reads }.push_back(id);
        self.list(requester, stream);
    }

    /// Puts a stream among those that have something to do.
    fn list(&mut self, requester: u32, stream: u32) {
        let here = &mut self.requesters[requester as usize];
        let queues = &mut here.streams[stream as usize];
        if !queues.listed {
            queues.listed = true;
            here.turns.push_back(stream);
        }
        self.pumps.push(requester);
    }

    pub(super) fn pump_timer(&mut self, requester: u32) {
        self.requesters[requester as usize].timer = false;
        self.pump(requester);
    }

    /// Makes packets while there is room for them.
    pub(super) fn pump(&mut self, requester: u32) {
        loop {
            let now = self.now;
            let here = &mut self.requesters[requester as usize];
            if here.waiting >= here.parameters.window || here.turns.is_empty() {
                return;
            }
            if here.next > now {
                if !here.timer {
                    here.timer = true;
                    let at = here.next;
                    self.events.schedule(at, Event::Pump(requester));
                }
                return;
            }
            let Some(id) = self.take_turn(requester) else { return };
            self.make_packet(requester, id);
        }
    }

    /// The operation whose packet is next. Streams that wait keep their places before it, so that none is
    /// passed over for ever; those that have nothing to do leave.
    fn take_turn(&mut self, requester: u32) -> Option<u32> {
        let now = self.now;
        let here = &mut self.requesters[requester as usize];
        let payload = here.parameters.payload;
        let mut nth = 0;
        while let Some(stream) = here.turns.get(nth).copied() {
            let queues = &mut here.streams[stream as usize];
            let write = queues.writes.front().copied().filter(|id| {
                let op = &self.ops[*id];
                // A copy fills its packets, but for the last.
                op.available >= op.left.min(u64::from(upto(payload, op.address)))
            });
            let read = queues.reads.front().copied().filter(|_| here.tags > 0);
            if here.tags == 0 && !queues.reads.is_empty() {
                here.starved_since = here.starved_since.min(now);
            }
            // Jobs' reads and writes take turns; but what a copy has read leaves its buffer before it reads more.
            let turns = queues.wrote && queues.unawaited == 0;
            let reads = turns && read.is_some_and(|id| self.ops[id].feeds == NONE);
            if let Some(id) = if reads { read } else { write.or(read) } {
                if nth > 0 {
                    here.turns.remove(nth);
                    here.turns.push_front(stream);
                    here.turn = u64::from(here.parameters.turn);
                }
                return Some(id);
            }
            if queues.writes.is_empty() && queues.reads.is_empty() {
                queues.listed = false;
                here.turns.remove(nth);
                if nth == 0 {
                    here.turn = u64::from(here.parameters.turn);
                }
            } else {
                nth += 1;
            }
        }
        None
    }

    fn make_packet(&mut self, requester: u32, id: u32) {
        let here = &mut self.requesters[requester as usize];
        let parameters = here.parameters;
        let op = &mut self.ops[id];
        let (address, bytes) = op.take(&parameters);
        let done = op.left == 0;
        let passed = done && op.is_unawaited();
        // Not the whole: a copy would wait for what was written just now.
        let Op { write, stream, route, until, job, .. } = *op;
        here.moved += if self.now >= self.measured_from { bytes } else { 0 };
        let gap = parameters.gap_after(write, done);
        here.paced += if self.now >= self.measured_from { gap } else { Time::ZERO };
        here.waiting += 1;
        let moving = parameters.engine.map_or(0, |rate| bytes * 1_000_000_000_000 / rate.max(1));
        here.next = self.now + gap.max(Time::from_ps(moving));
        // A turn ends with its bytes, or with what there was to do.
        here.turn = here.turn.saturating_sub(bytes);
        if done || here.turn == 0 {
            here.turn = u64::from(parameters.turn);
            if here.turns.len() > 1 {
                here.turns.rotate_left(1);
            }
        }
        let queues = &mut here.streams[stream as usize];
        queues.wrote = write;
        queues.unawaited -= u32::from(passed);
        if done {
            if write { &mut queues.writes } else { &mut queues.reads }.pop_front();
        }
        let owner = if write {
            id
        } else {
            here.tags -= 1;
            self.requests.put(Request::new(id, address, bytes as u32))
        };
        let packet = self.make(Tlp {
            class: if write { PacketClass::Posted } else { PacketClass::NonPosted },
            last: write && done,
            translated: false,
            hop: self.routes[route as usize].first,
            bytes: bytes as u32,
            owner,
            ingress: NONE,
            maker: requester,
            address,
            level: 0,
            room_level: 0,
            room_bytes: 0,
            piece: false,
            order: 0,
        });
        if done && until == Until::Issued && job != NONE {
            self.ops[id].job = NONE;
            self.wake_job(job);
        }
        // A processor's packets cross its root complex first.
        let delay = self.parts[self.requesters[requester as usize].part as usize]
            .delay(self.tlps[packet].class);
        if delay == Time::ZERO {
            self.ready(packet);
        } else {
            let at = self.now + delay;
            self.events.schedule(at, Event::Ready(packet));
        }
    }

    /// A packet has left the part where it was made.
    pub(super) fn left_maker(&mut self, requester: u32) {
        self.requesters[requester as usize].waiting -= 1;
        self.pumps.push(requester);
    }

    /// A write has come to its target.
    pub(super) fn landed(&mut self, id: u32) {
        let job = self.ops[id].job;
        self.ops.remove(id);
        if job != NONE {
            self.go_on(job);
        }
    }

    /// Counts a completion's bytes before it has come, unless they are to be written on as they come.
    pub(super) fn take_early(&mut self, request: u32, bytes: u32) -> bool {
        let entry = &mut self.requests[request];
        let op = &mut self.ops[entry.op];
        if op.feeds != NONE {
            return false;
        }
        entry.left -= bytes;
        op.missing -= u64::from(bytes);
        let flow = op.flow;
        self.moved(flow, u64::from(bytes));
        true
    }

    /// A completion of `bytes` has come.
    pub(super) fn completed(&mut self, request: u32, bytes: u32) {
        let entry = &mut self.requests[request];
        entry.left -= bytes;
        let (id, whole) = (entry.op, entry.left == 0);
        let op = &mut self.ops[id];
        op.missing -= u64::from(bytes);
        let Op { requester, missing, feeds, flow, job, .. } = *op;
        self.moved(flow, u64::from(bytes));
        if whole {
            self.requests.remove(request);
            let here = &mut self.requesters[requester as usize];
            here.tags += 1;
            let since = std::mem::replace(&mut here.starved_since, Time::MAX);
            here.starved += self.now.since(since.max(self.measured_from));
            self.pumps.push(requester);
        }
        if feeds != NONE {
            let write = &mut self.ops[feeds];
            write.available += u64::from(bytes);
            let (requester, stream) = (write.requester, write.stream);
            self.list(requester, stream);
        }
        if missing == 0 {
            self.ops.remove(id);
            if job != NONE {
                self.go_on(job);
            }
        }
    }
}
