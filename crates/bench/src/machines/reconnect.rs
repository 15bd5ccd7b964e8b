//! How long after the return of a network the first operation of a borrowed drive completes, against a bare connection
//! that is made anew, with its TLS handshake and an exchange of as many bytes.
//!
//! Both go through a relay of this process. While it is cut, connections are closed as soon as they are made.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveOptions};
use rackbus_identity::CertificateAuthority;

use super::network::{Desk, RackMachine, free_address};
use super::{bare, failed};
use crate::BenchError;
use crate::rack::BenchRack;

/// How long the network is away: so long that the link looks for the other machine in intervals that do not grow.
const AWAY: Duration = Duration::from_millis(2500);
/// Besides, one more of these in each run, so that it returns at another part of such an interval.
const STEP: Duration = Duration::from_millis(210);
/// Bytes that are read.
const BYTES: usize = 4096;

/// The rack: a drive of alpha's, in memory.
const RACK: &str = "name = \"reconnect\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"16 MiB\"\n\
                    backing = \"memory\"\n[hosts.beta]\n";

/// A way to an address, which can be cut.
struct Relay {
    address: String,
    state: Arc<Mutex<RelayState>>,
}

#[derive(Default)]
struct RelayState {
    is_cut: bool,
    sockets: Vec<TcpStream>,
}

fn lock(state: &Mutex<RelayState>) -> MutexGuard<'_, RelayState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relay {
    /// A relay to `to`, which may be listened at later.
    fn start(to: String) -> Result<Relay, BenchError> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?.to_string();
        let state = Arc::<Mutex<RelayState>>::default();
        let known = Arc::downgrade(&state);
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Some(state) = known.upgrade() else { return };
                let mut state = lock(&state);
                let far = TcpStream::connect(&to).ok().filter(|_| !state.is_cut);
                let Some(far) = far else { continue };
                let joined = join(&near, &far).and_then(|()| join(&far, &near));
                if joined.is_ok() {
                    state.sockets.extend([near, far]);
                }
            }
        });
        Ok(Relay { address, state })
    }

    /// Ends what goes through it, and lets nothing more through.
    fn cut(&self) {
        let mut state = lock(&self.state);
        state.is_cut = true;
        for socket in state.sockets.drain(..) {
            // One that has ended is cut already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Lets connections through from now on.
    fn open(&self) {
        lock(&self.state).is_cut = false;
    }
}

/// Passes on what comes from one socket to the other, until one of both ends.
fn join(from: &TcpStream, to: &TcpStream) -> std::io::Result<()> {
    from.set_nodelay(true)?;
    let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
    std::thread::spawn(move || {
        // An end of either is one of both.
        let _ = std::io::copy(&mut from, &mut to);
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
    Ok(())
}

/// How long to be away in this run.
fn away(run: u32) -> Duration {
    AWAY + STEP * (run % 5)
}

/// A drive of another machine, on the other side of a relay.
pub(super) struct FarDrive {
    drive: Option<Drive>,
    relay: Relay,
    runs: u32,
    _machines: [RackMachine; 2],
    _desk: Desk,
}

impl FarDrive {
    /// Starts the machines in `dir` and borrows; `None` where there is no `rackbus`.
    ///
    /// # Errors
    /// When they do not come up.
    pub(super) fn borrow(dir: &Path) -> Result<Option<FarDrive>, BenchError> {
        let Some(program) = BenchRack::find() else { return Ok(None) };
        let desk = Desk::start(&program, dir, RACK)?;
        let listen = free_address()?;
        let relay = Relay::start(listen.clone())?;
        let alpha = desk.join("alpha", &listen, &["--advertise", &relay.address])?;
        let beta = desk.join("beta", &free_address()?, &[])?;
        let lease = beta.run(&["borrow", "alpha/nvme0", "--for", "beta", "--json"])?;
        let lease: serde_json::Value = serde_json::from_str(&lease).map_err(failed)?;
        let socket = lease["socket"].as_str().ok_or_else(|| failed("the lease has no socket"))?;
        let mut drive = Drive::open(Path::new(socket), DriveOptions::default())?;
        drive.write(0, &[7; BYTES], false)?;
        let (drive, runs, _machines) = (Some(drive), 0, [alpha, beta]);
        Ok(Some(FarDrive { drive, relay, runs, _machines, _desk: desk }))
    }

    /// Milliseconds from the network's return to the end of a read that was begun while it was away.
    ///
    /// # Errors
    /// When the drive was lost meanwhile.
    pub(super) fn run(&mut self) -> Result<f64, BenchError> {
        let mut drive = self.drive.take().ok_or_else(|| failed("the drive was lost"))?;
        self.relay.cut();
        self.runs += 1;
        let reads = std::thread::spawn(move || {
            let mut read = [0; BYTES];
            let done = drive.read(0, &mut read);
            (done.map(|()| read == [7; BYTES]), Instant::now(), drive)
        });
        std::thread::sleep(away(self.runs));
        let early = reads.is_finished();
        self.relay.open();
        let back = Instant::now();
        let (done, at, drive) = reads.join().map_err(|_| failed("the reader has failed"))?;
        self.drive = Some(drive);
        match done? {
            true if !early => Ok(at.saturating_duration_since(back).as_secs_f64() * 1e3),
            true => Err(failed("the drive was read while its machine could not be reached")),
            false => Err(failed("the drive has something else than was written")),
        }
    }
}

/// A server over TLS, on the other side of a relay.
pub(super) struct FarServer<'a> {
    authority: &'a CertificateAuthority,
    relay: Relay,
}

impl<'a> FarServer<'a> {
    /// Starts the server, behind a relay of its own.
    ///
    /// # Errors
    /// When it cannot listen.
    pub(super) fn start(authority: &'a CertificateAuthority) -> Result<FarServer<'a>, BenchError> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let relay = Relay::start(listener.local_addr().map_err(failed)?.to_string())?;
        let credentials = bare::credentials(authority)?;
        std::thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                // A client that has gone is no end of the server.
                let _ = bare::server(&credentials, socket).and_then(|mut pipe| {
                    pipe.read_exact(&mut [0])?;
                    pipe.write_all(&[7; BYTES])?;
                    pipe.flush()
                });
            }
        });
        Ok(FarServer { authority, relay })
    }

    /// Milliseconds from the network's return to the end of the first exchange, where the client connects at once.
    ///
    /// # Errors
    /// When the exchange fails.
    pub(super) fn run(&self) -> Result<f64, BenchError> {
        self.relay.cut();
        let credentials = bare::credentials(self.authority)?;
        self.relay.open();
        let back = Instant::now();
        let socket = TcpStream::connect(&self.relay.address).map_err(failed)?;
        let mut pipe = bare::client(&credentials, socket)?;
        pipe.write_all(&[3]).and_then(|()| pipe.flush()).map_err(failed)?;
        pipe.read_exact(&mut [0; BYTES]).map_err(failed)?;
        Ok(back.elapsed().as_secs_f64() * 1e3)
    }
}
