//! Streams and round trips between two ends of a network: the same for all that are compared.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use rackbus_netdev::namespace;

use crate::BenchError;
use crate::machine::{own_processor_time, processor_time};

/// Bytes of a write.
const CHUNK: usize = 128 << 10;

/// After this long without a datagram none will come.
const END: Duration = Duration::from_millis(200);

/// Two ends: the second one listens at an address.
#[derive(Debug)]
pub struct TrafficEnds {
    /// Their network namespaces; this one's without any.
    pub spaces: Option<(File, File)>,
    /// Where the second end listens.
    pub address: IpAddr,
    /// Processes that carry what goes between them, beside this one and the kernel.
    pub carriers: Vec<u32>,
}

/// The result of a run of streams, datagrams or copies.
#[derive(Debug, Clone, Copy)]
pub struct StreamResult {
    /// Throughput at the receiver, in Gbit/s.
    pub rate: f64,
    /// Seconds of processor time for each gigabyte, of all who send, carry and receive it.
    pub cost: f64,
}

impl StreamResult {
    /// What came of so many bytes in a time, for which processors worked so long.
    pub fn of(bytes: u64, time: Duration, worked: Duration) -> StreamResult {
        let cost = worked.as_secs_f64() * 1e9 / bytes as f64;
        StreamResult { rate: bytes as f64 * 8e-9 / time.as_secs_f64(), cost }
    }
}

/// The result of a run of packets between two threads or processes.
#[derive(Debug, Clone, Copy)]
pub struct PacketResult {
    /// Millions of packets a second that come out.
    pub rate: f64,
    /// Seconds of processor time for each gigabyte of them, of both sides.
    pub cost: f64,
}

impl PacketResult {
    /// What came of `packets` of so many bytes in a time, for which processors worked so long.
    pub fn of(packets: u64, bytes: usize, time: Duration, worked: Duration) -> PacketResult {
        let gigabytes = (packets * bytes as u64) as f64 / 1e9;
        let rate = packets as f64 / time.as_secs_f64() / 1e6;
        PacketResult { rate, cost: worked.as_secs_f64() / gigabytes }
    }
}

impl TrafficEnds {
    fn listen(&self) -> Result<TcpListener, BenchError> {
        let at = SocketAddr::new(self.address, 0);
        let bind = move || TcpListener::bind(at);
        let listener = match &self.spaces {
            Some((_, second)) => namespace::within(second, bind),
            None => bind(),
        };
        listener.map_err(BenchError::io("listening"))
    }

    fn connect(&self, listener: &TcpListener) -> Result<(TcpStream, TcpStream), BenchError> {
        let failed = || BenchError::io("connecting");
        let at = listener.local_addr().map_err(failed())?;
        let connect = move || TcpStream::connect_timeout(&at, Duration::from_secs(10));
        let near = match &self.spaces {
            Some((first, _)) => namespace::within(first, connect),
            None => connect(),
        };
        let near = near.map_err(failed())?;
        let (far, _) = listener.accept().map_err(failed())?;
        for end in [&near, &far] {
            end.set_nodelay(true).map_err(failed())?;
            end.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed())?;
        }
        Ok((near, far))
    }

    fn processor_time(&self) -> Duration {
        let carriers = self.carriers.iter().map(|pid| processor_time(*pid)).sum::<Duration>();
        own_processor_time() + carriers
    }

    /// What came of so many bytes in a time, for which processors had worked so long `before`.
    fn flow(&self, bytes: u64, time: Duration, before: Duration) -> StreamResult {
        StreamResult::of(bytes, time, self.processor_time().saturating_sub(before))
    }

    /// So many streams in one direction, for about `time`.
    ///
    /// # Errors
    /// When the two ends do not reach each other.
    pub fn streams(&self, count: usize, time: Duration) -> Result<StreamResult, BenchError> {
        let listener = self.listen()?;
        let ends = (0..count).map(|_| self.connect(&listener));
        let ends = ends.collect::<Result<Vec<_>, _>>()?;
        let (before, begun) = (self.processor_time(), Instant::now());
        let threads = ends.into_iter().map(|(mut near, mut far)| {
            let writer = std::thread::spawn(move || {
                let data = vec![0x5a; CHUNK];
                loop {
                    near.write_all(&data)?;
                    if begun.elapsed() >= time {
                        return Ok::<_, std::io::Error>(());
                    }
                }
            });
            let reader = std::thread::spawn(move || {
                let (mut data, mut bytes) = (vec![0; CHUNK], 0u64);
                loop {
                    match far.read(&mut data) {
                        Ok(0) => return Ok(bytes),
                        Ok(read) => bytes += read as u64,
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) => return Err(error),
                    }
                }
            });
            (writer, reader)
        });
        let threads: Vec<_> = threads.collect();
        let mut bytes = 0;
        for (writer, reader) in threads {
            let failed = || BenchError::io("a stream");
            let lost = |_| std::io::Error::other("a thread failed");
            writer.join().map_err(lost).and_then(|it| it).map_err(failed())?;
            bytes += reader.join().map_err(lost).and_then(|it| it).map_err(failed())?;
        }
        Ok(self.flow(bytes, begun.elapsed(), before))
    }

    /// Datagrams of so many bytes in one direction, as fast as their sender can, for about `time`. What is dropped on the
    /// way is no part of the rate, and its cost is.
    ///
    /// # Errors
    /// When the two ends do not reach each other.
    pub fn datagrams(&self, bytes: usize, time: Duration) -> Result<StreamResult, BenchError> {
        let failed = || BenchError::io("datagrams");
        let bind = move |at: SocketAddr| move || UdpSocket::bind(at);
        let (near, far) = (bind(([0, 0, 0, 0], 0).into()), bind((self.address, 0).into()));
        let (near, far) = match &self.spaces {
            Some((first, second)) => {
                (namespace::within(first, near), namespace::within(second, far))
            }
            None => (near(), far()),
        };
        let (near, far) = (near.map_err(failed())?, far.map_err(failed())?);
        near.connect(far.local_addr().map_err(failed())?).map_err(failed())?;
        let (before, begun) = (self.processor_time(), Instant::now());
        let sender = std::thread::spawn(move || {
            let data = vec![0x5a; bytes];
            while begun.elapsed() < time {
                near.send(&data)?;
            }
            Ok::<_, std::io::Error>(())
        });
        far.set_read_timeout(Some(END)).map_err(failed())?;
        let (mut data, mut arrived, mut last) = (vec![0; bytes], 0, begun);
        while let Ok(length) = far.recv(&mut data) {
            (arrived, last) = (arrived + length as u64, Instant::now());
        }
        let lost = |_| std::io::Error::other("a thread failed");
        sender.join().map_err(lost).and_then(|it| it).map_err(failed())?;
        if arrived == 0 {
            return Err(BenchError::Peer("no datagram arrived".to_owned()));
        }
        Ok(self.flow(arrived, last - begun, before))
    }

    /// Microseconds of a request and its answer of 64 bytes each: the median, for about `time`.
    ///
    /// # Errors
    /// When the two ends do not reach each other.
    pub fn round_trips(&self, time: Duration) -> Result<f64, BenchError> {
        let failed = || BenchError::io("a round trip");
        let listener = self.listen()?;
        let (mut near, mut far) = self.connect(&listener)?;
        let answering = std::thread::spawn(move || {
            let mut message = [0; 64];
            while far.read_exact(&mut message).is_ok() && far.write_all(&message).is_ok() {}
        });
        let (begun, mut trips, mut message) = (Instant::now(), Vec::new(), [0; 64]);
        while begun.elapsed() < time || trips.is_empty() {
            let sent = Instant::now();
            near.write_all(&message).map_err(failed())?;
            near.read_exact(&mut message).map_err(failed())?;
            trips.push(sent.elapsed().as_secs_f64() * 1e6);
        }
        drop(near);
        let _ = answering.join();
        Ok(crate::report::median(&trips))
    }
}
