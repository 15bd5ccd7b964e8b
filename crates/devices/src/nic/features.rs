//! The features of a network function (virtio 1.2, section 5.1.3), and which of them go together.

use rackbus_net::Offload;
use rackbus_net::offload::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, NEEDS_CSUM,
};
use rackbus_spec::virtio::{feature as common, net::feature as net};

/// What is offered to every driver.
pub const OFFERED: u64 = common::VERSION_1
    | common::ACCESS_PLATFORM
    | common::INDIRECT_DESC
    | common::EVENT_IDX
    | common::RING_PACKED
    | common::NOTIFICATION_DATA
    | common::RING_RESET
    | net::GUEST_OFFLOADS
    | net::CTRL_GUEST_OFFLOADS
    | net::CSUM
    | net::HOST_TSO4
    | net::HOST_TSO6
    | net::HOST_ECN
    | net::HOST_USO
    | net::MTU
    | net::MAC
    | net::MRG_RXBUF
    | net::STATUS
    | net::CTRL_VQ
    | net::CTRL_RX
    | net::CTRL_RX_EXTRA
    | net::CTRL_VLAN
    | net::CTRL_MAC_ADDR
    | net::GUEST_ANNOUNCE
    | net::SPEED_DUPLEX;

/// What earlier versions offered besides: a state that they saved may have it. Who does not take datagrams to be cut into
/// IP fragments cannot be given any, since nobody here cuts them so.
pub const FORMER: u64 = net::HOST_UFO;

/// What each feature needs beside it (section 5.1.3.1): all of the first mask, if any, and any of the second.
const NEEDS: [(u64, u64, u64); 18] = [
    (net::GUEST_TSO4, net::GUEST_CSUM, 0),
    (net::GUEST_TSO6, net::GUEST_CSUM, 0),
    (net::GUEST_ECN, 0, net::GUEST_TSO4 | net::GUEST_TSO6),
    (net::GUEST_UFO, net::GUEST_CSUM, 0),
    (net::GUEST_USO4, net::GUEST_CSUM, 0),
    (net::GUEST_USO6, net::GUEST_CSUM, 0),
    (net::HOST_TSO4, net::CSUM, 0),
    (net::HOST_TSO6, net::CSUM, 0),
    (net::HOST_ECN, 0, net::HOST_TSO4 | net::HOST_TSO6),
    (net::HOST_UFO, net::CSUM, 0),
    (net::HOST_USO, net::CSUM, 0),
    (net::CTRL_RX, net::CTRL_VQ, 0),
    (net::CTRL_RX_EXTRA, net::CTRL_VQ, 0),
    (net::CTRL_VLAN, net::CTRL_VQ, 0),
    (net::GUEST_ANNOUNCE, net::CTRL_VQ, 0),
    (net::MQ, net::CTRL_VQ, 0),
    (net::CTRL_MAC_ADDR, net::CTRL_VQ, 0),
    (net::CTRL_GUEST_OFFLOADS, net::CTRL_VQ, 0),
];

/// Whether a driver may accept these features together.
pub fn allows(features: u64) -> bool {
    NEEDS.iter().all(|(feature, all, any)| {
        features & feature == 0 || (features & all == *all && (*any == 0 || features & any != 0))
    })
}

/// Whether a frame that leaves this to others may be sent under these features: `CSUM` and `HOST_*` of its sender, or
/// `GUEST_*` of its receiver, which `bits` names in that order: checksum, TCP over IPv4, over IPv6, congestion bits,
/// fragments, UDP (each of the two bits is needed).
fn covers(features: u64, offload: &Offload, bits: [u64; 6]) -> bool {
    let [checksum, tcp4, tcp6, congestion, fragments, datagrams] = bits;
    let kind = match offload.gso_type & !GSO_ECN {
        GSO_NONE => 0,
        GSO_TCPV4 => tcp4,
        GSO_TCPV6 => tcp6,
        GSO_UDP => fragments,
        GSO_UDP_L4 => datagrams,
        _ => return false,
    };
    let ecn = if offload.gso_type & GSO_ECN != 0 { congestion } else { 0 };
    let sum = if offload.flags & NEEDS_CSUM != 0 { checksum } else { 0 };
    let wanted = kind | ecn | sum;
    features & wanted == wanted
}

/// Whether a driver that accepted these features may send such a frame.
pub fn may_send(features: u64, offload: &Offload) -> bool {
    let bits =
        [net::CSUM, net::HOST_TSO4, net::HOST_TSO6, net::HOST_ECN, net::HOST_UFO, net::HOST_USO];
    covers(features, offload, bits)
}

/// Whether a driver that takes these offloads takes such a frame as it is.
pub fn takes(offloads: u64, offload: &Offload) -> bool {
    let datagrams = net::GUEST_USO4 | net::GUEST_USO6;
    let bits = [
        net::GUEST_CSUM,
        net::GUEST_TSO4,
        net::GUEST_TSO6,
        net::GUEST_ECN,
        net::GUEST_UFO,
        datagrams,
    ];
    covers(offloads, offload, bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_build_on_others_are_accepted_with_them_only() {
        assert!(allows(OFFERED | net::MQ));
        assert!(allows(common::VERSION_1));
        for (feature, all, any) in NEEDS {
            assert!(allows(OFFERED | feature));
            assert!(!allows(OFFERED & !all & !any | feature), "{feature:#x}");
        }
    }

    #[test]
    fn what_is_left_to_others_is_covered_by_a_feature_each() {
        let tcp = Offload { flags: NEEDS_CSUM, gso_type: GSO_TCPV4, ..Offload::default() };
        assert!(may_send(net::CSUM | net::HOST_TSO4, &tcp));
        assert!(!may_send(net::CSUM, &tcp) && !may_send(net::HOST_TSO4, &tcp));
        let congested = Offload { gso_type: GSO_TCPV4 | GSO_ECN, ..tcp };
        assert!(!takes(net::GUEST_CSUM | net::GUEST_TSO4, &congested));
        assert!(takes(net::GUEST_OFFLOADS, &congested));
        let datagrams = Offload { gso_type: GSO_UDP_L4, ..tcp };
        assert!(!takes(net::GUEST_OFFLOADS & !net::GUEST_USO6, &datagrams));
        assert!(takes(0, &Offload::default()));
        assert!(!takes(net::GUEST_OFFLOADS, &Offload { gso_type: 2, ..tcp }));
    }
}
