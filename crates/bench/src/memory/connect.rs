//! Connecting: from a segment's number to the first store in it, against what two processes need at
//! least to share memory, and the answers of two other processes.

use std::sync::atomic::Ordering;
use std::time::Instant;

use rackbus_attach::{AttachError, LocalSegment, NodeId, Session};
use rustix::net::{RecvFlags, SocketType};

use super::pingpong::one_way;
use super::plain::FilePassing;
use super::system::Socket;
use super::{Bench, typical};
use crate::BenchError;
use crate::report::median;

/// Bytes of the segment.
const BYTES: usize = 4096;
/// For how many milliseconds a connection is waited for.
const SOON: u32 = 1_000;
/// Connections that one program has at a time.
const HELD: usize = 100;
/// Connections in a second that are asked for.
const ASKED: f64 = 10_000.0;

impl Bench<'_> {
    pub(super) fn connecting(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let (segment, _) = self.hosts.segment(BYTES)?;
        let (owner, user) = (self.hosts.alpha.node(), self.hosts.beta.clone());
        // A program that ends a connection does not wait for its node to do that. This waits until it has, so that what
        // one round leaves to it is not measured in the next; the last case measures both.
        let settle = || user.segments().map(drop);
        let passing = FilePassing::new()?;
        let (mut near, mut far) = Socket::pair(SocketType::SEQPACKET, RecvFlags::empty())?;
        self.pairs(
            (
                "connect, map, first store",
                "a passed memory file and two UNIX-socket round trips",
                "us",
            ),
            || {
                let (begun, mut took) = (Instant::now(), Vec::new());
                while begun.elapsed() < time {
                    took.push(first_store(&user, owner, &segment)? * 1e6);
                    settle()?;
                }
                Ok(median(&took))
            },
            || {
                let pass = typical(time / 2, 16, || passing.share(BYTES))? * 1e6;
                let round_trip = 2.0 * one_way(&mut near, &mut far, time / 2)? / 1e3;
                Ok(pass + 2.0 * round_trip)
            },
        )?;
        self.pairs(
            ("connections made", "what is asked", "per second"),
            || {
                let mut held = Vec::with_capacity(HELD);
                let mut took = Vec::new();
                let begun = Instant::now();
                while begun.elapsed() < time {
                    let asked = Instant::now();
                    for _ in 0..HELD {
                        held.push(user.connect(owner, segment.id(), SOON)?);
                    }
                    took.push(asked.elapsed().as_secs_f64());
                    held.clear();
                    settle()?;
                }
                Ok(HELD as f64 / median(&took))
            },
            || Ok(ASKED),
        )?;
        self.pairs(
            ("connections made and ended", "what is asked to be made", "per second"),
            || {
                let cycle = typical(time, 8, || {
                    drop(user.connect(owner, segment.id(), SOON)?);
                    Ok(())
                })?;
                Ok(1.0 / cycle)
            },
            || Ok(ASKED),
        )
    }
}

/// Seconds from asking to having stored.
fn first_store(user: &Session, owner: NodeId, segment: &LocalSegment) -> Result<f64, AttachError> {
    let begun = Instant::now();
    let remote = user.connect(owner, segment.id(), SOON)?;
    let mapping = remote.map(0, BYTES as u64)?;
    mapping.whole().store_u64(0, 1, Ordering::Release);
    Ok(begun.elapsed().as_secs_f64())
}
