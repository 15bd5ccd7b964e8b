//! Two threads that exchange the bytes of reads over a socket, and do nothing else: both poll.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_identity::rustls::{ClientConnection, ServerConnection, StreamOwned};
use rackbus_identity::{CertificateAuthority, Credentials, Subject};

use super::failed;
use crate::BenchError;
use crate::nvme::ClientLoad;

/// Bytes of what asks for a read, and of what is before its data, as the link has them.
const ASK: usize = 36;
const ANSWER: usize = 20;

/// Whose certificate both ends have.
const ALPHA: &str = "alpha";

trait Pipe: Read + Write + Send {}
impl<T: Read + Write + Send> Pipe for T {}

/// Both ends of a connection: who asks, and who answers.
type Ends = (Box<dyn Pipe>, Box<dyn Pipe>);

/// What both ends of a connection over TLS show.
pub(super) fn credentials(
    authority: &CertificateAuthority,
) -> Result<Arc<Credentials>, BenchError> {
    Ok(Arc::new(authority.issue(&Subject::Node(ALPHA.to_owned())).map_err(failed)?))
}

/// The end of a connection that was made to the other one, after the handshake.
pub(super) fn client(
    credentials: &Credentials,
    mut socket: TcpStream,
) -> Result<StreamOwned<ClientConnection, TcpStream>, BenchError> {
    socket.set_nodelay(true).map_err(failed)?;
    let subject = Subject::Node(ALPHA.to_owned());
    let name = subject.server_name().ok_or_else(|| failed("alpha is no name"))?;
    let mut tls = ClientConnection::new(credentials.client().clone(), name).map_err(failed)?;
    while tls.is_handshaking() || tls.wants_write() {
        tls.complete_io(&mut socket).map_err(failed)?;
    }
    Ok(StreamOwned::new(tls, socket))
}

/// The end that answers what the first one asks.
pub(super) fn server(
    credentials: &Credentials,
    mut socket: TcpStream,
) -> std::io::Result<StreamOwned<ServerConnection, TcpStream>> {
    socket.set_nodelay(true)?;
    let tls = ServerConnection::new(credentials.server().clone());
    let mut tls = tls.map_err(std::io::Error::other)?;
    while tls.is_handshaking() || tls.wants_write() {
        tls.complete_io(&mut socket)?;
    }
    Ok(StreamOwned::new(tls, socket))
}

fn pipes(authority: &CertificateAuthority, over_tls: bool) -> Result<Ends, BenchError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    let near = TcpStream::connect(listener.local_addr().map_err(failed)?).map_err(failed)?;
    let (far, _) = listener.accept().map_err(failed)?;
    if !over_tls {
        for socket in [&near, &far] {
            socket.set_nodelay(true).map_err(failed)?;
            socket.set_nonblocking(true).map_err(failed)?;
        }
        return Ok((Box::new(near), Box::new(far)));
    }
    let shown = credentials(authority)?;
    let handshake = std::thread::spawn({
        let shown = shown.clone();
        move || server(&shown, far)
    });
    let near = client(&shown, near)?;
    let done = handshake.join().map_err(|_| failed("the handshake failed"))?;
    let far = done.map_err(failed)?;
    for socket in [&near.sock, &far.sock] {
        socket.set_nonblocking(true).map_err(failed)?;
    }
    Ok((Box::new(near), Box::new(far)))
}

/// Sends all of `bytes`; false when the other side has gone.
fn send(pipe: &mut dyn Pipe, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match pipe.write(bytes) {
            Ok(0) => return false,
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
    loop {
        match pipe.flush() {
            Ok(()) => return true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
}

/// Receives what is there; `None` when the other side has gone.
fn receive(pipe: &mut dyn Pipe, buffer: &mut [u8]) -> Option<usize> {
    match pipe.read(buffer) {
        Ok(0) => None,
        Ok(count) => Some(count),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Some(0),
        Err(_) => None,
    }
}

/// Answers each ask with `bytes` of data, until the other side has gone.
fn serve(pipe: &mut dyn Pipe, bytes: usize) {
    let (answer, mut buffer) = (vec![7; ANSWER + bytes], vec![0; 64 << 10]);
    let mut asked = 0;
    while let Some(count) = receive(pipe, &mut buffer) {
        asked += count;
        while asked >= ASK {
            asked -= ASK;
            if !send(pipe, &answer) {
                return;
            }
        }
    }
}

/// Reads a second, with as many under way as the load has.
pub fn run(
    authority: &CertificateAuthority,
    load: &ClientLoad,
    over_tls: bool,
    time: Duration,
) -> Result<f64, BenchError> {
    let (mut client, mut server) = pipes(authority, over_tls)?;
    let bytes = load.bytes;
    let other = std::thread::spawn(move || serve(&mut *server, bytes));
    let (ask, mut buffer) = ([3; ASK], vec![0; 64 << 10]);
    let gone = || failed("the other thread has gone");
    let (mut under_way, mut received, mut done) = (0, 0, 0u64);
    let begun = Instant::now();
    while begun.elapsed() < time {
        while under_way < usize::from(load.depth) {
            if !send(&mut *client, &ask) {
                return Err(gone());
            }
            under_way += 1;
        }
        received += receive(&mut *client, &mut buffer).ok_or_else(gone)?;
        while received >= ANSWER + bytes {
            received -= ANSWER + bytes;
            under_way -= 1;
            done += 1;
        }
    }
    let rate = done as f64 / begun.elapsed().as_secs_f64();
    drop(client);
    let _ = other.join();
    Ok(rate)
}
