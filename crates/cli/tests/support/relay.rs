//! A relay between two machines, which a test has break connections in the ways in which networks do.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What happens to what goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// Bytes pass in both directions.
    Open,
    /// Connections stay, and nothing passes; new ones are taken, and nothing passes there either.
    Silent,
    /// As [`Silent`](Passage::Silent), towards the machine that connects alone.
    SilentBack,
    /// As [`Silent`](Passage::Silent), from the machine that connects alone.
    SilentForth,
    /// New connections are closed at once.
    Closed,
}

/// A relay to one address.
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    passage: Passage,
    /// Both ends of each connection.
    connections: Vec<[TcpStream; 2]>,
    taken: usize,
}

/// How long a socket is waited for before the passage is looked at again.
const LOOK: Duration = Duration::from_millis(5);

impl Relay {
    /// A relay to `to`, which may be listened at later.
    pub fn start(to: String) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Vec::new();
        let shared = Shared { passage: Passage::Open, connections, taken: 0 };
        let shared = Arc::new(Mutex::new(shared));
        let known = Arc::downgrade(&shared);
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Some(shared) = known.upgrade() else { return };
                let mut state = lock(&shared);
                let far = TcpStream::connect(&to);
                let Some(far) = far.ok().filter(|_| state.passage != Passage::Closed) else {
                    continue;
                };
                for socket in [&near, &far] {
                    socket.set_nodelay(true).unwrap();
                    socket.set_read_timeout(Some(LOOK)).unwrap();
                }
                let ends = [&near, &far].map(|socket| socket.try_clone().unwrap());
                for (back, from, to) in [(false, &near, &far), (true, &far, &near)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let shared = shared.clone();
                    std::thread::spawn(move || pass(back, from, to, &shared));
                }
                state.connections.push(ends);
                state.taken += 1;
            }
        });
        Relay { address, shared }
    }

    /// The address at which the relay takes connections.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// From now on, this happens.
    pub fn set(&self, passage: Passage) {
        lock(&self.shared).passage = passage;
    }

    /// Ends all connections there are.
    pub fn kill(&self) {
        for socket in lock(&self.shared).connections.drain(..).flatten() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// How many connections went through it so far.
    pub fn taken(&self) -> usize {
        lock(&self.shared).taken
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.set(Passage::Closed);
        self.kill();
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pass(back: bool, mut from: TcpStream, mut to: TcpStream, shared: &Mutex<Shared>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let is_silent = match lock(shared).passage {
            Passage::Silent => true,
            Passage::SilentBack => back,
            Passage::SilentForth => !back,
            Passage::Open | Passage::Closed => false,
        };
        if is_silent {
            // What comes is left in the sockets: it never arrives where the connection ends before.
            std::thread::sleep(LOOK);
            continue;
        }
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
