//! Connecting while a network may be about to come back.
//!
//! What a kernel sends to begin a connection may be lost; it repeats that after a second. So a connection is begun anew more
//! often than that, beside the first, and the one that is made first counts. Of the other, where that is made as well, the peer
//! hears nothing.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// How long connecting may take, and how often it is begun meanwhile.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectPace {
    pub(super) limit: Duration,
    pub(super) every: Duration,
}

/// Connects to the first of the addresses that `place` stands for which answers in time.
pub(super) fn connect_to(place: &str, pace: ConnectPace) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "it has no address");
    for address in place.to_socket_addrs()? {
        match connect(&address, pace) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect(address: &SocketAddr, pace: ConnectPace) -> std::io::Result<TcpStream> {
    let (begun, mut attempts) = (Instant::now(), 0);
    // The first goes on as long as there is time, for a network that is slow; the newest beside it.
    let mut sockets: Vec<TcpStream> = Vec::new();
    loop {
        let now = begun.elapsed();
        if now >= pace.limit {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut next = pace.every.saturating_mul(attempts);
        if now >= next {
            sockets.truncate(1);
            sockets.push(begin(address)?);
            attempts += 1;
            next += pace.every;
        }
        if let Some(at) = first_ready(&sockets, next.min(pace.limit).saturating_sub(now))? {
            let socket = sockets.swap_remove(at);
            return match socket.take_error()? {
                None => Ok(socket),
                Some(error) => Err(error),
            };
        }
    }
}

/// A connection that is under way.
fn begin(address: &SocketAddr) -> std::io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}

/// Waits until one of them is made or has failed: which.
fn first_ready(sockets: &[TcpStream], limit: Duration) -> std::io::Result<Option<usize>> {
    let polled = |socket| PollFd::from_borrowed_fd(TcpStream::as_fd(socket), PollFlags::OUT);
    let mut fds: Vec<PollFd<'_>> = sockets.iter().map(polled).collect();
    let limit = limit.try_into().unwrap_or_default();
    match poll(&mut fds, Some(&limit)) {
        Ok(_) => Ok(fds.iter().position(|fd| !fd.revents().is_empty())),
        Err(Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::net::{bind, getsockname, listen};

    use super::*;

    const SOON: Duration = Duration::from_millis(900);

    #[test]
    fn connects_where_somebody_listens_and_nowhere_else() {
        let pace = ConnectPace { limit: SOON, every: SOON };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        let socket = connect_to(&place, pace).unwrap();
        assert_eq!(listener.accept().unwrap().1, socket.local_addr().unwrap());
        drop(listener);
        let error = connect_to(&place, pace).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }

    /// One whose queue is full loses what begins a connection, as a network does that is away.
    #[test]
    fn what_was_lost_is_begun_again_before_the_kernel_repeats_it() {
        let socket =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let listener = socket.unwrap();
        bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        listen(&listener, 0).unwrap();
        let address = SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap();
        let listener = TcpListener::from(listener);
        let place = &address.to_string();
        let _fills = TcpStream::connect(address).unwrap();
        let once = ConnectPace { limit: SOON / 3, every: SOON };
        let error = connect_to(place, once).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "nothing was lost");
        std::thread::scope(|scope| {
            let begun = ConnectPace { limit: SOON, every: Duration::from_millis(50) };
            let connects = scope.spawn(move || connect_to(place, begun));
            // The first is lost before that.
            std::thread::sleep(Duration::from_millis(100));
            let _first = listener.accept().unwrap();
            connects.join().unwrap().unwrap();
        });
    }
}
