//! The network between hosts: streams and round trips of stock sockets against other ways between two network
//! namespaces, and its rings alone.

mod forwarder;
mod traffic;

use std::path::PathBuf;
use std::time::Duration;

pub use forwarder::Forwarder;
pub use traffic::Pair;

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// Where the rack's sockets and state go.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compared_joins_two_ends() {
        let loopback = Pair { spaces: None, address: [127, 0, 0, 1].into() };
        assert!(loopback.round_trips(Duration::from_millis(5)).unwrap() > 0.0);
        assert!(loopback.streams(2, Duration::from_millis(5)).unwrap() > 0.0);
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: making network interfaces takes root");
            return;
        }
        let forwarder = Forwarder::start().unwrap();
        assert!(forwarder.pair.round_trips(Duration::from_millis(5)).unwrap() > 0.0);
        assert!(forwarder.pair.streams(1, Duration::from_millis(5)).unwrap() > 0.0);
    }
}
