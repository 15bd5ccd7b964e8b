//! What sessions do, and what happens to nodes and conversations.

use rackbus_seeds::Random;
use rackbus_segment::message::{
    InterruptKind, SegmentAccess, SegmentKind, SessionRequest, TargetKind, Withdrawal,
};
use rackbus_segment::{Handle, NodeId, SessionId};

use super::NODES;
use super::rack::{Client, Rack};

/// Something that a session, or fate, does.
#[derive(Debug, Clone)]
pub enum Step {
    Session { node: usize, answers: bool },
    End { who: usize },
    Crash { node: usize },
    Lose { connector: usize, owner: usize },
    Pass { milliseconds: u64 },
    Deliver { choice: usize, times: usize },
    Create { who: usize, id: u32, group: bool },
    Offer { who: usize, which: usize },
    Withdraw { who: usize, which: usize, how: u8 },
    Remove { who: usize, which: usize },
    Connect { who: usize, node: usize, id: u32, group: bool },
    Disconnect { who: usize, which: usize },
    Rule { who: usize, id: u32, node: usize, share: u8 },
    Interrupt { who: usize, number: u32, data: bool },
    Trigger { who: usize, node: usize, number: u32, data: bool },
    Allocate { who: usize },
    Pages { who: usize, which: usize, page: u64, node: usize, open: bool },
    Reach { who: usize, node: usize, page: u64 },
}

/// What somebody does next; the numbers are out of a hundred.
pub fn step(random: &mut Random) -> Step {
    let (who, which) = (random.below(8), random.below(4));
    let (node, id) = (random.below(3), 1 + random.below(3) as u32);
    let mut chance = |percent| random.below(100) < percent;
    let (group, data, answers) = (chance(20), chance(50), chance(90));
    let number = id.min(2);
    match random.below(62) {
        0..3 => Step::Session { node, answers },
        3 => Step::End { who },
        4 => Step::Crash { node },
        5..17 => Step::Deliver { choice: random.next() as usize, times: 1 + random.below(5) },
        17..21 => Step::Create { who, id, group },
        21..26 => Step::Offer { who, which },
        26..29 => Step::Withdraw { who, which, how: random.below(3) as u8 },
        29 => Step::Remove { who, which },
        30..38 => Step::Connect { who, node, id, group },
        38..40 => Step::Disconnect { who, which },
        40..43 => Step::Rule { who, id, node, share: random.below(3) as u8 },
        43 => Step::Interrupt { who, number, data },
        44..46 => Step::Trigger { who, node, number, data },
        46..48 => Step::Allocate { who },
        48..55 => {
            let page = random.below(4) as u64;
            Step::Pages { who, which, page, node, open: data }
        }
        58..60 => Step::Lose { connector: node, owner: (node + 1 + which % 2) % 3 },
        60..62 => {
            // Often a little more than one time limit of a move: a mistake by that much cuts somebody off.
            let milliseconds = if data { 2_000 + random.below(500) } else { random.below(5_000) };
            Step::Pass { milliseconds: milliseconds as u64 }
        }
        _ => Step::Reach { who, node, page: random.below(8) as u64 },
    }
}

impl Rack {
    fn client(&self, nth: usize) -> Option<(NodeId, SessionId)> {
        self.clients.keys().nth(nth % self.clients.len().max(1)).copied()
    }

    fn one_of(
        &self,
        who: usize,
        which: usize,
        of: fn(&Client) -> &Vec<Handle>,
    ) -> Option<((NodeId, SessionId), Handle)> {
        let who = self.client(who)?;
        let handles = of(&self.clients[&who]);
        Some((who, *handles.get(which % handles.len().max(1))?))
    }

    pub fn take(&mut self, step: &Step) {
        match *step {
            Step::Session { node, answers } => self.new_session(NODES[node], answers),
            Step::End { who } => {
                if let Some(who) = self.client(who) {
                    self.end_session(who);
                }
            }
            Step::Crash { node } => self.crash(NODES[node]),
            Step::Lose { connector, owner } => {
                self.lose_conversation(NODES[connector], NODES[owner]);
            }
            Step::Pass { milliseconds } => self.pass(milliseconds),
            Step::Deliver { choice, times } => {
                for nth in 0..times {
                    self.deliver(choice.wrapping_add(nth));
                }
            }
            _ => {
                if let Some((who, request)) = self.request(step) {
                    // What is released is not the client's any more, whatever is answered.
                    if let SessionRequest::Disconnect { connection: handle }
                    | SessionRequest::Remove { segment: handle } = request
                    {
                        let client = self.clients.get_mut(&who).unwrap();
                        client.memory.remove(&handle);
                        client.connections.retain(|it| *it != handle);
                        client.segments.retain(|it| *it != handle);
                    }
                    self.ask(who, request);
                }
            }
        }
    }

    fn request(&self, step: &Step) -> Option<((NodeId, SessionId), SessionRequest)> {
        let segments: fn(&Client) -> &Vec<Handle> = |client| &client.segments;
        let kind = |data| if data { InterruptKind::Data } else { InterruptKind::Plain };
        Some(match *step {
            Step::Create { who, id, group } => {
                let kind = if group { SegmentKind::Group } else { SegmentKind::Shared };
                let size = 8192;
                (self.client(who)?, SessionRequest::CreateSegment { id, choose: false, size, kind })
            }
            Step::Offer { who, which } => {
                let (who, segment) = self.one_of(who, which, segments)?;
                (who, SessionRequest::SetAvailable { segment })
            }
            Step::Withdraw { who, which, how } => {
                let (who, segment) = self.one_of(who, which, segments)?;
                let how = [Withdrawal::Quiet, Withdrawal::Notify, Withdrawal::Force][how as usize];
                (who, SessionRequest::SetUnavailable { segment, how })
            }
            Step::Remove { who, which } => {
                let (who, segment) = self.one_of(who, which, segments)?;
                (who, SessionRequest::Remove { segment })
            }
            Step::Connect { who, node, id, group } => {
                let what = if group { TargetKind::Group } else { TargetKind::Segment };
                let node = NODES[node];
                (self.client(who)?, SessionRequest::Connect { node, id, timeout_ms: 1_000, what })
            }
            Step::Disconnect { who, which } => {
                let (who, connection) = self.one_of(who, which, |client| &client.connections)?;
                (who, SessionRequest::Disconnect { connection })
            }
            Step::Rule { who, id, node, share } => {
                let share = [SegmentAccess::None, SegmentAccess::Read, SegmentAccess::Write]
                    [share as usize];
                let node = Some(NODES[node]);
                (self.client(who)?, SessionRequest::SetShare { first: id, last: id, node, share })
            }
            Step::Interrupt { who, number, data } => {
                let (kind, number) = (kind(data), Some(number));
                (self.client(who)?, SessionRequest::CreateInterrupt { kind, number, shared: !data })
            }
            Step::Trigger { who, node, number, data } => {
                let (node, kind, timeout_ms) = (NODES[node], kind(data), 1_000);
                let request = SessionRequest::ConnectInterrupt { node, kind, number, timeout_ms };
                (self.client(who)?, request)
            }
            Step::Allocate { who } => {
                (self.client(who)?, SessionRequest::Allocate { size: 4 * 4096 })
            }
            Step::Pages { who, which, page, node, open } => {
                let (who, extent) = self.one_of(who, which, |client| &client.extents)?;
                let (offset, length) = (page * 4096, 4096);
                let request = match open {
                    true => {
                        let (node, write) = (NODES[node], true);
                        SessionRequest::OpenPages { extent, offset, length, node, write }
                    }
                    false => SessionRequest::ClosePages { extent, offset, length },
                };
                (who, request)
            }
            Step::Reach { who, node, page } => {
                let address = (u64::from(NODES[node]) << 32) + page * 4096;
                (self.client(who)?, SessionRequest::MapPages { address, length: 4096 })
            }
            _ => return None,
        })
    }
}
