//! The port that a function has, wherever that is.

use rackbus_net::NetworkPort;

use super::medium::RemotePort;

/// The port that a function sends by.
#[derive(Default)]
pub(super) enum NicPort {
    /// There is no network.
    #[default]
    Absent,
    /// Of this node's network.
    Own(Box<dyn NetworkPort>),
    /// Of another node, for which this is a front.
    Remote(Box<RemotePort>),
}

impl NicPort {
    pub fn get(&self) -> Option<&dyn NetworkPort> {
        match self {
            NicPort::Absent => None,
            NicPort::Own(port) => Some(&**port),
            NicPort::Remote(port) => Some(&**port),
        }
    }

    pub fn get_mut(&mut self) -> Option<&mut dyn NetworkPort> {
        match self {
            NicPort::Absent => None,
            NicPort::Own(port) => Some(&mut **port),
            NicPort::Remote(port) => Some(&mut **port),
        }
    }
}
