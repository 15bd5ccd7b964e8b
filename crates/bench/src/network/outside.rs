//! A virtual function that its lender's host has itself, and two that another host has borrowed, which reach a third
//! machine (a network namespace) by the rack's uplink. All are driven from here. The fronts of the first two run in the lender's
//! node, as that of a function on one machine does: only the second one's lease is another host's. That of the third runs in the
//! borrower's node, and its frames go between the two nodes.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_driver::net::{Net, NetError, NetOptions};
use rackbus_netdev::namespace;
use rackbus_spec::virtio::net::NetHeader;

use super::ends::ip;
use crate::BenchError;
use crate::rack::BenchRack;

/// Where the third machine is, and the port that it answers at.
const THERE: Ipv4Addr = Ipv4Addr::new(10, 77, 200, 1);
const MAC: [u8; 6] = [2, 0x77, 0, 0, 0, 0xfe];
const PORT: u16 = 7;
/// Bytes of a datagram that fills a frame.
const WHOLE: usize = 1472;
/// Frames that are handed over at once.
const BATCH: usize = 16;
/// What never comes is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The third machine, with a cable to this one.
struct Beyond {
    name: String,
    cable: String,
}

impl Beyond {
    fn make() -> Result<Beyond, BenchError> {
        let own = std::process::id();
        let beyond = Beyond { name: format!("rackbus-bench-{own}-o"), cable: format!("out{own}") };
        let Beyond { name, cable } = &beyond;
        namespace::create(name).map_err(BenchError::io("making a namespace"))?;
        ip(&format!("link add {cable} type veth peer name far0 netns {name}"))?;
        ip(&format!("link set {cable} up"))?;
        let [a, b, c, d, e, f] = MAC;
        ip(&format!("-n {name} link set far0 address {a:x}:{b:x}:{c:x}:{d:x}:{e:x}:{f:x} up"))?;
        ip(&format!("-n {name} address add {THERE}/16 dev far0"))?;
        Ok(beyond)
    }

    /// What answers there, with as many bytes as it got where that is less than a whole frame's, and counts the others.
    fn serve(&self, stop: &Arc<AtomicBool>) -> Result<Arc<AtomicU64>, BenchError> {
        let failed = || BenchError::io("listening outside");
        let space = namespace::open(&self.name).map_err(failed())?;
        let socket = namespace::within(&space, || UdpSocket::bind((THERE, PORT)));
        let socket = socket.map_err(failed())?;
        socket.set_read_timeout(Some(Duration::from_millis(100))).map_err(failed())?;
        let (count, stop) = (Arc::new(AtomicU64::new(0)), stop.clone());
        let counts = count.clone();
        std::thread::spawn(move || {
            let mut data = [0; WHOLE];
            while !stop.load(Ordering::Relaxed) {
                match socket.recv_from(&mut data) {
                    Ok((WHOLE, _)) => drop(counts.fetch_add(1, Ordering::Relaxed)),
                    Ok((length, from)) => drop(socket.send_to(&data[..length], from)),
                    Err(_) => {}
                }
            }
        });
        Ok(count)
    }
}

impl Drop for Beyond {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {}", self.cable));
        let _ = namespace::remove(&self.name);
    }
}

/// A rack with an uplink, functions for both hosts, and the third machine.
pub struct Outside {
    /// Before the rack and the third machine: they are used until they are dropped.
    pub owner: BenchStation,
    /// The function that another host has borrowed, with its front at the lender.
    pub borrower: BenchStation,
    /// One that another host has borrowed with strict isolation: its front is at the borrower.
    pub apart: BenchStation,
    stop: Arc<AtomicBool>,
    _rack: BenchRack,
    _beyond: Beyond,
}

impl Outside {
    /// Starts all of it in `dir`; `None` when there is no `rackbus` to start it with.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(dir: &Path) -> Result<Option<Outside>, BenchError> {
        let beyond = Beyond::make()?;
        let text = format!(
            "name = \"bench{}\"\n[network]\nuplinks = [\"alpha/{}\"]\n\
             [hosts.alpha.devices.nic0]\nkind = \"nic\"\nfunctions = 3\n[hosts.beta]\n",
            std::process::id(),
            beyond.cable
        );
        let Some(rack) = BenchRack::start(dir, &text)? else { return Ok(None) };
        rack.net_up()?;
        let stop = Arc::new(AtomicBool::new(false));
        let count = beyond.serve(&stop)?;
        let station = |host: &str, number: u8, isolation: &[&str]| {
            let function = format!("alpha/nic0.vf{number}");
            let arguments = [isolation, &[&*function]].concat();
            let lease = rack.borrow_for(host, &arguments)?;
            let options = NetOptions { transmit_buffer: 2048, ..NetOptions::default() };
            let net = Net::open(&lease.socket, PATIENCE, options);
            let net = net.map_err(driving)?;
            let here = Ipv4Addr::new(10, 77, 150, number);
            let mac = net.info().mac.map(|byte| format!("{byte:02x}")).join(":");
            let name = &beyond.name;
            ip(&format!("-n {name} neigh replace {here} lladdr {mac} dev far0 nud permanent"))?;
            Ok::<_, BenchError>(BenchStation { net, here, count: count.clone() })
        };
        let (owner, borrower) = (station("alpha", 1, &[])?, station("beta", 2, &[])?);
        let apart = station("beta", 3, &["--isolation", "strict"])?;
        Ok(Some(Outside { owner, borrower, apart, stop, _rack: rack, _beyond: beyond }))
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn driving(error: NetError) -> BenchError {
    BenchError::Peer(error.to_string())
}

/// A network function that this process drives, as a station of the rack.
pub struct BenchStation {
    net: Net,
    here: Ipv4Addr,
    count: Arc<AtomicU64>,
}

impl BenchStation {
    /// A datagram of so many bytes for the third machine.
    fn datagram(&self, bytes: usize) -> Vec<u8> {
        let there = SocketAddr::from((THERE, PORT));
        let mut frame = [&MAC[..], &self.net.info().mac, &[8, 0]].concat();
        let length = |bytes: usize| (bytes as u16).to_be_bytes();
        let mut header =
            [&[0x45, 0][..], &length(28 + bytes), &[0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
        header.extend(self.here.octets());
        header.extend(THERE.octets());
        let words = header.chunks(2).map(|it| u32::from(it[0]) << 8 | u32::from(it[1]));
        let sum: u32 = words.sum();
        let checksum = !((sum >> 16) + (sum & 0xffff)) as u16;
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        frame.extend(header);
        // Without a checksum of its own, as UDP over IPv4 may be.
        frame.extend([there.port().to_be_bytes(), there.port().to_be_bytes()].as_flattened());
        frame.extend([length(8 + bytes), [0, 0]].as_flattened());
        frame.resize(frame.len() + bytes, 0x5a);
        frame
    }

    /// Microseconds until 64 bytes are back: the median.
    ///
    /// # Errors
    /// When the function fails, or nothing comes back.
    pub fn round_trips(&mut self, time: Duration) -> Result<f64, BenchError> {
        let frame = self.datagram(64);
        let (begun, mut trips, mut back) = (Instant::now(), Vec::new(), Vec::new());
        while begun.elapsed() < time || trips.is_empty() {
            let sent = Instant::now();
            self.net.send(0, &NetHeader::default(), &frame).map_err(driving)?;
            self.net.flush(0).map_err(driving)?;
            // What is for all comes here, too.
            while !(back.len() == frame.len() && back[6..12] == MAC) {
                if self.net.receive(0, &mut back).map_err(driving)?.is_none() {
                    std::thread::yield_now();
                }
                // One may be lost while the uplink comes up.
                if sent.elapsed() > PATIENCE / 10 {
                    break;
                }
            }
            match back.is_empty() {
                false => trips.push(sent.elapsed().as_secs_f64() * 1e6),
                true if begun.elapsed() > PATIENCE => {
                    return Err(BenchError::Peer("nothing comes back from outside".to_owned()));
                }
                true => {}
            }
            back.clear();
        }
        Ok(crate::report::median(&trips))
    }

    /// Gbit/s of whole frames that arrive there.
    ///
    /// # Errors
    /// When the function fails.
    pub fn rate(&mut self, time: Duration) -> Result<f64, BenchError> {
        let frame = self.datagram(WHOLE);
        let (begun, before) = (Instant::now(), self.count.load(Ordering::Relaxed));
        while begun.elapsed() < time {
            for _ in 0..BATCH {
                if !self.net.send(0, &NetHeader::default(), &frame).map_err(driving)? {
                    std::thread::yield_now();
                    break;
                }
            }
            self.net.flush(0).map_err(driving)?;
        }
        let seconds = begun.elapsed().as_secs_f64();
        let arrived = self.count.load(Ordering::Relaxed) - before;
        while self.net.unsent(0).map_err(driving)? > 0 {
            std::thread::yield_now();
        }
        Ok((arrived * frame.len() as u64) as f64 * 8e-9 / seconds)
    }
}
