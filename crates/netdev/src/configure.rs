//! What an interface's users see of it: its addresses, its longest packet and who is behind it. By netlink.

use std::io;
use std::net::IpAddr;

use rtnetlink::packet_route::address::AddressHeaderFlags;
use rtnetlink::{Handle, LinkUnspec};
use rustix::net::{AddressFamily, SocketType, netdevice};

/// What an interface gets.
#[derive(Debug, Clone)]
pub struct InterfaceSettings {
    /// The interface's Ethernet address, made from its place in the rack.
    pub mac: [u8; 6],
    /// Bytes of the longest IP packet.
    pub mtu: u16,
    /// Its IP addresses, each with the length of its network's prefix. No two interfaces of the network have the
    /// same: nobody is asked.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The stations behind it, which are never asked for.
    pub neighbours: Vec<(IpAddr, [u8; 6])>,
}

/// Takes an interface of the calling thread's network namespace up with these settings, and the loopback with it.
///
/// # Errors
/// What the system says.
pub fn configure(name: &str, settings: &InterfaceSettings) -> io::Result<()> {
    let index = |name| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        netdevice::name_to_index(socket, name)
    };
    let (own, loopback) = (index(name)?, index("lo")?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let connection = tokio::spawn(connection);
        let outcome = set(&handle, settings, own, loopback).await;
        connection.abort();
        Ok::<_, io::Error>(outcome)
    })?;
    outcome.map_err(|error| match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    })
}

async fn set(
    handle: &Handle,
    settings: &InterfaceSettings,
    own: u32,
    loopback: u32,
) -> Result<(), rtnetlink::Error> {
    handle.link().set(LinkUnspec::new_with_index(loopback).up().build()).execute().await?;
    let link = LinkUnspec::new_with_index(own)
        .address(settings.mac.to_vec())
        .mtu(settings.mtu.into())
        .up()
        .build();
    handle.link().set(link).execute().await?;
    for (address, prefix) in &settings.addresses {
        let mut request = handle.address().add(own, *address, *prefix).replace();
        if address.is_ipv6() {
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        request.execute().await?;
    }
    for (address, mac) in &settings.neighbours {
        let neighbour = handle.neighbours().add(own, *address);
        neighbour.link_layer_address(mac).replace().execute().await?;
    }
    Ok(())
}
