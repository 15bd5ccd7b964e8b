//! Streams and round trips between two ends of a network: the same for all that are compared.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rackbus_netdev::namespace;

use crate::BenchError;

/// Bytes of a write.
const CHUNK: usize = 128 << 10;

/// Two ends: the second one listens at an address.
#[derive(Debug)]
pub struct Pair {
    /// Their network namespaces; this one's without any.
    pub spaces: Option<(File, File)>,
    /// Where the second end listens.
    pub address: IpAddr,
}

impl Pair {
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

    /// Gbit/s of so many streams in one direction, for about `time`.
    ///
    /// # Errors
    /// When the two ends do not reach each other.
    pub fn streams(&self, count: usize, time: Duration) -> Result<f64, BenchError> {
        let listener = self.listen()?;
        let ends = (0..count).map(|_| self.connect(&listener));
        let ends = ends.collect::<Result<Vec<_>, _>>()?;
        let begun = Instant::now();
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
        Ok(bytes as f64 * 8e-9 / begun.elapsed().as_secs_f64())
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
