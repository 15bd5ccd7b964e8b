//! Interrupts between hosts, with and without data, against bare cache lines where the receiver
//! polls, and against an eventfd and a UNIX datagram where it sleeps.

use rackbus_attach::{
    AttachError, DataInterrupt, Interrupt, RemoteDataInterrupt, RemoteInterrupt, Session,
};
use rustix::net::{RecvFlags, SocketType};

use super::Bench;
use super::pingpong::{PingPongEnd, one_way, wake_up};
use super::plain::PingPongLines;
use super::system::{EventFd, MESSAGE, Socket};
use crate::BenchError;

impl Bench<'_> {
    pub(super) fn signals(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let (alpha, beta) = (self.hosts.alpha.clone(), self.hosts.beta.clone());
        let mut page = 0;
        // Where the lines are decides how far away they are: every run takes others, on both sides.
        // Those of earlier runs stay, so that their memory is not given out again.
        let mut kept = Vec::new();
        self.pairs(
            ("interrupt, polled, one way", "two bare cache lines", "ns"),
            || {
                let (mut near, mut far) = Signal::pair(&beta, &alpha)?;
                let took = one_way(&mut near, &mut far, time);
                kept.push((near, far));
                took
            },
            || {
                page += 1;
                let (mut near, mut far) = PingPongLines::pair(page)?;
                one_way(&mut near, &mut far, time)
            },
        )?;
        let (mut near, mut far) = Signal::pair(&beta, &alpha)?;
        let (mut bare_near, mut bare_far) = EventFd::pair()?;
        self.pairs(
            ("interrupt, wake-up", "eventfd", "us"),
            || wake_up(&mut near, &mut far, time),
            || wake_up(&mut bare_near, &mut bare_far, time),
        )?;
        let (mut near, mut far) = Data::pair(&beta, &alpha)?;
        let (mut bare_near, mut bare_far) = Socket::pair(SocketType::DGRAM, RecvFlags::DONTWAIT)?;
        self.pairs(
            ("64 B data interrupt, polled, one way", "UNIX datagram", "ns"),
            || one_way(&mut near, &mut far, time),
            || one_way(&mut bare_near, &mut bare_far, time),
        )?;
        let (mut bare_near, mut bare_far) = Socket::pair(SocketType::DGRAM, RecvFlags::empty())?;
        self.pairs(
            ("64 B data interrupt, wake-up", "UNIX datagram", "us"),
            || wake_up(&mut near, &mut far, time),
            || wake_up(&mut bare_near, &mut bare_far, time),
        )
    }
}

/// For how many milliseconds a connection is waited for.
const SOON: u32 = 1_000;

/// Interrupts in both directions. The two sides are in cache lines of their own, as in two processes.
#[repr(align(128))]
struct Signal {
    to: RemoteInterrupt,
    from: Interrupt,
}

impl Signal {
    fn pair(near: &Session, far: &Session) -> Result<(Signal, Signal), AttachError> {
        let (one, other) =
            (near.create_interrupt(None, false, true)?, far.create_interrupt(None, false, true)?);
        let there = near.connect_interrupt(far.node(), other.number(), SOON)?;
        let back = far.connect_interrupt(near.node(), one.number(), SOON)?;
        Ok((Signal { to: there, from: one }, Signal { to: back, from: other }))
    }
}

fn gone(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}

impl PingPongEnd for Signal {
    fn send(&mut self) -> Result<(), BenchError> {
        self.to.trigger().map_err(gone)
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        self.from.wait(None).map_err(gone)
    }
}

/// Data interrupts in both directions.
struct Data {
    to: RemoteDataInterrupt,
    from: DataInterrupt,
    data: [u8; MESSAGE],
}

impl Data {
    fn pair(near: &Session, far: &Session) -> Result<(Data, Data), AttachError> {
        let (one, other) = (near.create_data_interrupt(None)?, far.create_data_interrupt(None)?);
        let there = near.connect_data_interrupt(far.node(), other.number(), SOON)?;
        let back = far.connect_data_interrupt(near.node(), one.number(), SOON)?;
        let side = |to, from| Data { to, from, data: [0; MESSAGE] };
        Ok((side(there, one), side(back, other)))
    }
}

impl PingPongEnd for Data {
    fn send(&mut self) -> Result<(), BenchError> {
        self.to.send(&self.data).map_err(gone)
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        self.from.receive(&mut self.data, None).map(drop).map_err(gone)
    }
}
