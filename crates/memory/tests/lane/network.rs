//! The simulated lane, and the sockets beside it.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rackbus_memory::exchange::lane::{Lane, LaneError, LaneTarget, PROOF_BYTES};
use rackbus_memory::{Carrier, Region, StreamError};
use rackbus_seeds::Random;

/// What the other side proves that the lane leads to it by.
pub const PROOF: [u8; PROOF_BYTES] = *b"0123456789abcdef";

/// When the side that answers takes its memory away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// When it is told to.
    AtOnce,
    /// With the session: the wrong policy.
    WithTheSession,
}

struct Moving {
    id: u64,
    write: bool,
    offset: usize,
    length: usize,
    /// What is on its way, of a write that was given up.
    late: Option<Vec<u8>>,
}

/// The lane, as it is between the two sides.
pub struct Between {
    asking: Option<Arc<Region>>,
    exposed: Option<Arc<Region>>,
    closing: Closing,
    moving: Vec<Moving>,
    ended: Vec<u64>,
    /// The next look at it finds that it has failed.
    pub failed: bool,
    /// It has room for no more than so many transfers.
    room: usize,
    /// Writes that landed, or would have, after they were given up.
    pub late: u64,
    pub closed: u64,
}

impl Between {
    pub fn new(closing: Closing, room: usize) -> Arc<Mutex<Between>> {
        let (moving, ended) = (Vec::new(), Vec::new());
        Arc::new(Mutex::new(Between {
            asking: None,
            exposed: None,
            closing,
            moving,
            ended,
            failed: false,
            room,
            late: 0,
            closed: 0,
        }))
    }

    /// Whether memory is exposed that the policy takes away.
    pub fn is_reachable(&self) -> bool {
        self.closing == Closing::AtOnce && self.exposed.is_some()
    }

    /// Ends the exposure where the policy forgot it: the session is over.
    pub fn end(&mut self) {
        self.exposed = None;
    }

    /// One of the transfers goes on, whichever.
    pub fn step(&mut self, random: &mut Random) {
        if self.moving.is_empty() {
            return;
        }
        let one = self.moving.swap_remove(random.below(self.moving.len()));
        let Some(exposed) = &self.exposed else {
            if one.late.is_none() {
                self.failed = true;
            }
            return;
        };
        let theirs = exposed.slice(one.offset, one.length).unwrap();
        if let Some(bytes) = one.late {
            self.late += 1;
            theirs.copy_from(&bytes);
            return;
        }
        let Some(asking) = &self.asking else { return };
        let ours = asking.slice(one.offset, one.length).unwrap();
        match one.write {
            true => theirs.copy_from_slice(ours),
            false => ours.copy_from_slice(theirs),
        };
        self.ended.push(one.id);
    }
}

/// The end of the side that asks.
pub struct SimulatedLane(pub Arc<Mutex<Between>>);

impl std::fmt::Debug for SimulatedLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimulatedLane")
    }
}

impl Lane for SimulatedLane {
    fn provider(&self) -> &str {
        "simulated"
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), LaneError> {
        self.0.lock().unwrap().asking = Some(region.clone());
        Ok(())
    }

    fn begin(
        &mut self,
        id: u64,
        write: bool,
        offset: usize,
        length: usize,
    ) -> Result<bool, LaneError> {
        let mut between = self.0.lock().unwrap();
        let has_room = between.moving.len() < between.room;
        if has_room {
            between.moving.push(Moving { id, write, offset, length, late: None });
        }
        Ok(has_room)
    }

    fn poll(&mut self, ended: &mut Vec<u64>) -> Result<(), LaneError> {
        let mut between = self.0.lock().unwrap();
        if between.failed {
            return Err(LaneError("it was told to fail".to_owned()));
        }
        ended.append(&mut between.ended);
        Ok(())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn rest(&mut self) -> bool {
        false
    }

    fn close(&mut self) -> bool {
        let mut between = self.0.lock().unwrap();
        let Some(asking) = between.asking.take() else { return true };
        between.closed += 1;
        between.ended.clear();
        // Nothing reaches this side's memory any more; what left it is on its way.
        between.moving.retain(|one| one.write);
        for one in &mut between.moving {
            let mut bytes = vec![0; one.length];
            asking.slice(one.offset, one.length).unwrap().copy_to(&mut bytes);
            one.late = Some(bytes);
        }
        true
    }
}

/// The memory that the side that answers exposes.
#[derive(Clone)]
pub struct SimulatedTarget(pub Arc<Mutex<Between>>, pub [u8; PROOF_BYTES]);

impl std::fmt::Debug for SimulatedTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimulatedTarget")
    }
}

impl LaneTarget for SimulatedTarget {
    fn provider(&self) -> &str {
        "simulated"
    }

    fn expose(&self, region: &Arc<Region>, proof: usize) -> Result<(), LaneError> {
        region.slice(proof, PROOF_BYTES).unwrap().copy_from(&self.1);
        self.0.lock().unwrap().exposed = Some(region.clone());
        Ok(())
    }

    fn failure(&self) -> Option<LaneError> {
        None
    }

    fn close(&self) -> bool {
        let mut between = self.0.lock().unwrap();
        if between.closing == Closing::AtOnce {
            between.exposed = None;
        }
        true
    }
}

/// A socket whose end does not mean that the session has ended.
#[derive(Debug)]
pub struct Cut(pub UnixStream, pub usize);

fn outcome(result: std::io::Result<usize>) -> Result<usize, StreamError> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other.map_err(|_| StreamError::TimedOut),
    }
}

impl Carrier for Cut {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let count = bytes.len().min(self.1);
        outcome(self.0.write(&bytes[..count]))
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let count = buffer.len().min(self.1);
        match self.0.read(&mut buffer[..count]) {
            Ok(0) => Err(StreamError::TimedOut),
            other => outcome(other),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn shut_down(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}
