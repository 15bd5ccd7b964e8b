//! A host's part in the rack's network: its ports, the rings between them and those of others, its interface.
//!
//! A port's queues belong to the threads that drive them: a `worker` for each queue of the interface, a
//! function's engine for its port. A queue that has something for a station asks for a ring (`RingOpener`). One
//! thread of this service answers: it makes the ring itself where the station is this host's, and asks the
//! station's node otherwise (`peers`). The memory of a ring is its receiver's, and a loan of the host's
//! fabric to the sender's host for as long as their conversation lasts. Between machines each end has a ring of its own,
//! and frames are carried from the one to the other (`carried`).
//!
//! That the interface is wanted is noted where its host's programs find it: by the name of its network namespace.
//! So a node that starts anew brings it up again by itself.

mod capture;
mod carried;
mod function;
mod interface;
mod messages;
mod peers;
mod requests;
mod rings;
mod status;
#[cfg(test)]
mod tests;
mod uplink;
mod wire;
mod worker;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rackbus_fabric::FabricHandle;
use rackbus_fabric::rack::Rack;
use rackbus_link::Connect;
use rackbus_net::port_queue::{NanosecondClock, PortQueueHandle};
use rackbus_net::{
    NetworkPort, News, PortOptions, PortQueue, PortQueueId, PortSource, Station, StationKind,
    StationSwitch, Stations,
};
use rackbus_netdev::namespace;
use rackbus_netdev::unread::UnreadFrames;

use crate::handover::boot_time_ns;

use function::FunctionPort;
use interface::MadeInterface;
use peers::{AskingNode, Peer};
use requests::{AskedRings, RingRequests, ring_requests};
use rings::{EndedRing, Ring};
pub(crate) use status::page;
use uplink::RunningUplink;
use worker::{TapQueue, Worker};

/// The name of the network namespace that a host's interface is in.
pub fn namespace_of(rack: &str, host: &str) -> String {
    format!("rackbus-{rack}-{host}")
}

/// Why the network cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The node may not make an interface.
    #[error("a network interface cannot be made without rights: {0}")]
    Rights(std::io::Error),
    /// The kernel has no TAP devices.
    #[error("the kernel has no TAP devices: {0}")]
    NoTap(std::io::Error),
    /// Making the interface failed.
    #[error("the interface cannot be made: {0}")]
    Interface(std::io::Error),
    /// An interface that leads outside cannot be used.
    #[error("the uplink {0}: {1}")]
    Uplink(String, std::io::Error),
    /// A capture is under way.
    #[error("the frames of {0} are captured already")]
    Captured(String),
    /// Its port went while it was captured.
    #[error("the capture of {0} has ended: its port was closed, or made anew")]
    PortGone(String),
    /// A file cannot be written.
    #[error("{0}")]
    File(String),
    /// There is no such port here.
    #[error("{0} is no port of this host, or it is down")]
    NoPort(String),
}

impl NetworkError {
    /// What the user can do.
    pub fn remedy(&self) -> &'static str {
        match self {
            NetworkError::Rights(_) => {
                "start the rack as root, or with the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN"
            }
            NetworkError::NoTap(_) => "load the module `tun`, and look for /dev/net/tun",
            NetworkError::Uplink(..) => "make the interface, or correct `uplinks` in the rack file",
            NetworkError::Captured(_) => "end the other capture first",
            NetworkError::PortGone(_) => "begin another one when it is up",
            NetworkError::File(_) => "name a file that the node can write",
            NetworkError::Interface(_) => "see the node's log",
            NetworkError::NoPort(_) => "see `rackbus net status`",
        }
    }

    fn of_interface(error: std::io::Error) -> NetworkError {
        match error.kind() {
            std::io::ErrorKind::PermissionDenied => NetworkError::Rights(error),
            std::io::ErrorKind::NotFound => NetworkError::NoTap(error),
            _ => NetworkError::Interface(error),
        }
    }
}

/// A host's part in the network; cheap to clone.
#[derive(Clone)]
pub struct NetworkService(Arc<Shared>);

impl std::fmt::Debug for NetworkService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetworkService").field("host", &self.0.host).finish_non_exhaustive()
    }
}

struct Shared {
    rack: String,
    host: String,
    stations: Stations,
    switch: Arc<StationSwitch>,
    clock: NanosecondClock,
    link: Arc<dyn Connect>,
    /// Whether the hosts are machines, which share no memory.
    apart: bool,
    requests: RingRequests,
    /// Taken by the thread that answers.
    asked: Mutex<Option<AskedRings>>,
    state: Mutex<State>,
    /// Held while the interface and the uplinks are made or taken away: one change at a time.
    changes: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// From the node's start on.
    fabric: Option<FabricHandle>,
    /// This host's ports, by station.
    ports: BTreeMap<usize, LocalPort>,
    /// The threads that move frames of the interface, one for each queue.
    workers: Vec<Worker>,
    uplinks: Vec<RunningUplink>,
    /// The rings in this host's memory, by number.
    rings: BTreeMap<u64, Ring>,
    /// Those that may still hold frames.
    ended_rings: Vec<EndedRing>,
    next_ring: u64,
    /// Other nodes, as far as they are asked.
    peers: HashMap<String, Peer>,
    /// The newest node of each host that has asked.
    askers: HashMap<String, Weak<AskingNode>>,
    next_request: u64,
}

/// A port of this host.
struct LocalPort {
    queues: Vec<PortQueueHandle>,
    /// Held by who captures its frames.
    captured: Weak<()>,
    /// What was not taken from the interface in time, where it is one.
    unread: Option<UnreadFrames>,
}

impl LocalPort {
    fn new(queues: Vec<PortQueueHandle>, unread: Option<UnreadFrames>) -> LocalPort {
        LocalPort { queues, captured: Weak::new(), unread }
    }
}

impl NetworkService {
    /// That of `host` in a rack whose network functions have `ports`; `apart` says whether its hosts are
    /// machines.
    pub fn new(
        rack: &Rack,
        ports: &BTreeMap<String, PortOptions>,
        host: &str,
        link: Arc<dyn Connect>,
        apart: bool,
    ) -> NetworkService {
        let stations = Stations::of(rack, ports);
        let switch = Arc::new(StationSwitch::new(
            stations.all(),
            rack.network.mtu,
            rack.network.flood_limit,
        ));
        let (requests, asked) = ring_requests();
        NetworkService(Arc::new(Shared {
            rack: rack.name.clone(),
            host: host.to_owned(),
            stations,
            switch,
            // An uplink is to know that its machine was asleep.
            clock: Arc::new(boot_time_ns),
            link,
            apart,
            requests,
            asked: Mutex::new(Some(asked)),
            state: Mutex::default(),
            changes: Mutex::default(),
        }))
    }

    /// Begins to open rings, lent by `fabric`. An interface that the host had before is made again.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn start(&self, fabric: FabricHandle) -> std::io::Result<()> {
        self.0.lock().fabric = Some(fabric);
        let asked = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(asked) = asked {
            let shared = Arc::downgrade(&self.0);
            let answer = move || {
                while let Some((from, to)) = asked.next() {
                    let Some(shared) = shared.upgrade() else { return };
                    shared.open(from, to);
                }
            };
            std::thread::Builder::new().name("network".into()).spawn(answer)?;
        }
        let wanted = namespace::open(&self.0.namespace()).is_ok();
        if wanted {
            let _one = self.0.change();
            if let Err(error) = self.make_interface() {
                tracing::warn!(%error, "the host's interface could not be brought up again");
            }
            if let Err(error) = self.start_uplinks(RunningUplink::resume) {
                tracing::warn!(%error, "an uplink could not be brought up again");
            }
        }
        Ok(())
    }

    /// Makes the host's interface, if it has none, and uses those that lead outside.
    ///
    /// # Errors
    /// [`NetworkError`]; then the host is in the network as it was before, or is not.
    pub fn up(&self) -> Result<(), NetworkError> {
        let _one = self.0.change();
        let made = self.make_interface()?;
        let before: HashSet<usize> =
            self.0.lock().uplinks.iter().map(|uplink| uplink.state().0).collect();
        let started = self.start_uplinks(RunningUplink::start);
        if started.is_err() {
            self.end_uplinks(|station| !before.contains(&station));
            if made && let Err(error) = self.take_interface() {
                tracing::warn!(%error, "the host's interface is not taken away");
            }
        }
        started
    }

    /// Uses the host's interfaces that lead outside.
    fn start_uplinks(
        &self,
        start: fn(&Arc<Shared>, usize) -> std::io::Result<RunningUplink>,
    ) -> Result<(), NetworkError> {
        let shared = &self.0;
        let is_own = |it: &Station| it.kind == StationKind::Uplink && it.host == shared.host;
        for (station, own) in shared.stations.all().iter().enumerate().filter(|(_, it)| is_own(it))
        {
            if shared.lock().uplinks.iter().any(|it| it.state().0 == station) {
                continue;
            }
            let uplink = start(shared, station)
                .map_err(|cause| NetworkError::Uplink(own.name.clone(), cause))?;
            shared.lock().uplinks.push(uplink);
        }
        Ok(())
    }

    /// Makes the host's interface; false when it has one. Under [`Shared::change`] alone: what is sent does not wait for it.
    fn make_interface(&self) -> Result<bool, NetworkError> {
        let shared = &self.0;
        let Some((station, own)) = shared.stations.named(&shared.host) else {
            return Err(NetworkError::NoPort(shared.host.clone()));
        };
        if shared.lock().ports.contains_key(&station) {
            return Ok(false);
        }
        // A namespace that is there says that the interface is wanted.
        let is_absent = |error: std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        let was_there = !namespace::open(&shared.namespace()).is_err_and(is_absent);
        let made = self.make_port(station, own).map_err(NetworkError::of_interface);
        if made.is_err() {
            let started = std::mem::take(&mut shared.lock().workers);
            // Their threads end here, and nobody waits for the state meanwhile.
            drop(started);
            shared.close_port(station);
        }
        if made.is_err()
            && !was_there
            && let Err(error) = namespace::remove(&shared.namespace())
        {
            tracing::warn!(%error, "the namespace of an interface that could not be made stays");
        }
        made.map(|()| true)
    }

    fn make_port(&self, station: usize, own: &Station) -> std::io::Result<()> {
        let shared = &self.0;
        let namespace = namespace::create(&shared.namespace())?;
        let count = shared.stations.network().queues;
        let MadeInterface { queues: taps, unread } =
            interface::create(&namespace, &shared.stations, own, count)?;
        let queue = |nth: usize| shared.port_queue(station, nth as u16);
        let queues = (0..taps.len()).map(queue).collect::<std::io::Result<Vec<PortQueue>>>()?;
        // Before the first frame is sent: whoever opens a ring for it answers a port.
        let handles = queues.iter().map(|queue| queue.handle().clone()).collect();
        shared.lock().ports.insert(station, LocalPort::new(handles, unread));
        for (nth, (port_queue, tap)) in queues.into_iter().zip(taps).enumerate() {
            let worker = Worker::start(&format!("net {nth}"), port_queue, TapQueue::new(tap))?;
            shared.lock().workers.push(worker);
        }
        tracing::info!(host = shared.host, mac = %own.mac, address = %own.ipv4, "interface up");
        Ok(())
    }

    /// Takes the host's interface and its namespace away.
    ///
    /// # Errors
    /// [`NetworkError`].
    pub fn down(&self) -> Result<(), NetworkError> {
        let _one = self.0.change();
        self.take_away()
    }

    fn take_away(&self) -> Result<(), NetworkError> {
        self.end_uplinks(|_| true);
        self.take_interface()
    }

    /// Ends the uplinks whose stations are meant.
    fn end_uplinks(&self, is_meant: impl Fn(usize) -> bool) {
        let ended: Vec<RunningUplink> =
            self.0.lock().uplinks.extract_if(.., |uplink| is_meant(uplink.state().0)).collect();
        // Their threads end here: they ask nothing of the service that waits.
        drop(ended);
    }

    fn take_interface(&self) -> Result<(), NetworkError> {
        let shared = &self.0;
        let Some((station, _)) = shared.stations.named(&shared.host) else { return Ok(()) };
        let workers = std::mem::take(&mut shared.lock().workers);
        drop(workers);
        shared.close_port(station);
        namespace::remove(&shared.namespace()).map_err(NetworkError::of_interface)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of it is made whole before anything can fail.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn namespace(&self) -> String {
        namespace_of(&self.rack, &self.host)
    }

    fn port_queue(&self, station: usize, number: u16) -> std::io::Result<PortQueue> {
        let opener = Arc::new(self.requests.clone());
        PortQueue::new(
            PortQueueId { station, number },
            self.switch.clone(),
            opener,
            self.clock.clone(),
        )
    }

    /// How many queues a station has, of whichever host.
    fn queues_of(&self, station: usize) -> u16 {
        match self.stations.all()[station].kind {
            StationKind::Host => self.stations.network().queues,
            StationKind::Function | StationKind::Uplink => 1,
        }
    }

    /// Opens a ring for a queue of this host's.
    fn open(self: &Arc<Self>, from: PortQueueId, to: usize) {
        let Some(station) = self.stations.all().get(to) else { return };
        if station.host != self.host {
            return self.ask(from, to, &station.host);
        }
        let mut state = self.lock();
        let Some(port_queue) = state.port_queue(from) else { return };
        match state.make_ring(self, None, from, to) {
            Ok(made) => port_queue.tell(News::Opened(to, made.sender)),
            Err(reason) => {
                tracing::debug!(reason, "a ring is not opened");
                port_queue.tell(News::Failed(to));
            }
        }
    }

    /// Nobody drives a port any more.
    fn close_port(&self, station: usize) {
        let mut state = self.lock();
        if state.ports.remove(&station).is_none() {
            return;
        }
        self.switch.forget(station);
        let closed: Vec<u64> = (state.rings.iter())
            .filter(|(_, ring)| ring.to == station || ring.from.station == station)
            .map(|(number, _)| *number)
            .collect();
        closed.into_iter().for_each(|number| state.end_ring(number));
        state.peers.values_mut().for_each(|peer| peer.sender_gone(station));
    }
}

impl State {
    fn port_queue(&self, id: PortQueueId) -> Option<PortQueueHandle> {
        self.ports.get(&id.station)?.queues.get(usize::from(id.number)).cloned()
    }
}

impl PortSource for NetworkService {
    fn port(&self, function: &str) -> std::io::Result<Box<dyn NetworkPort>> {
        let shared = &self.0;
        let unknown = || {
            let text = format!("{function} is no network function of this host");
            std::io::Error::new(std::io::ErrorKind::NotFound, text)
        };
        let (station, own) = shared.stations.named(function).ok_or_else(unknown)?;
        if own.host != shared.host || own.kind != StationKind::Function {
            return Err(unknown());
        }
        let port_queue = shared.port_queue(station, 0)?;
        let mut state = shared.lock();
        if state.ports.contains_key(&station) {
            return Err(std::io::Error::other(format!("the port of {function} is held already")));
        }
        state.ports.insert(station, LocalPort::new(vec![port_queue.handle().clone()], None));
        Ok(Box::new(FunctionPort::new(port_queue, station, shared.clone())))
    }
}
