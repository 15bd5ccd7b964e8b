//! NTBs by which the node speaks with the nodes at their other ends ([`rackbus_link::ntb`]): opened by VFIO.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};

use rackbus_link::ntb::{ArenaLayout, Arenas, NtbDriver, OpenNtb};
use rackbus_metal::MessageNtb;
use rackbus_vfio::{Bindings, PciAddress, VfioError};

/// What opens each of the NTBs that are named, by the host that it leads to; `taker` takes them from their drivers.
///
/// # Errors
/// When an address is none.
pub fn link_ntbs(
    named: &BTreeMap<String, String>,
    taker: &str,
) -> Result<Vec<(String, OpenNtb)>, VfioError> {
    let opening = |(host, address): (&String, &String)| {
        let (address, taker) = (address.parse::<PciAddress>()?, taker.to_owned());
        let open: OpenNtb = Box::new(move || open(address, &taker));
        Ok((host.clone(), open))
    };
    named.iter().map(opening).collect()
}

fn open(address: PciAddress, taker: &str) -> io::Result<Box<dyn NtbDriver>> {
    let bindings = Bindings::here();
    bindings.load_driver();
    bindings.take(address, taker, false).map_err(io::Error::other)?;
    let facts = bindings.sysfs().facts(address).map_err(io::Error::other)?;
    let bytes = |windows| ArenaLayout::within(windows).map(|layout| layout.bytes());
    let ntb = MessageNtb::open(facts, bytes).map_err(io::Error::other)?;
    let layout = ArenaLayout::within(ntb.window_sizes()).ok_or(io::ErrorKind::Unsupported)?;
    Ok(Box::new(LinkNtb { ntb, layout }))
}

/// An NTB that is open.
struct LinkNtb {
    ntb: MessageNtb,
    layout: ArenaLayout,
}

impl Arenas for LinkNtb {
    fn load(&self, at: u32) -> u32 {
        // All words of the layout are inside and aligned.
        self.ntb.memory().whole().load_u32(at as usize, Ordering::Acquire).unwrap_or(0)
    }

    fn copy(&self, at: u32, out: &mut [u8]) {
        if let Some(part) = self.ntb.memory().whole().part(at as usize, out.len()) {
            part.copy_to(out);
        }
    }

    fn clear(&self, at: u32, bytes: u32) {
        if let Some(part) = self.ntb.memory().whole().part(at as usize, bytes as usize) {
            part.fill(0);
        }
    }

    fn store(&self, at: u32, words: &[u32]) {
        // A device's memory is stored to in order on x86; others need to be told.
        fence(Ordering::Release);
        self.ntb.outbound().store(at.into(), words);
    }

    fn was_cut(&self) -> bool {
        self.ntb.was_cut()
    }
}

impl NtbDriver for LinkNtb {
    fn layout(&self) -> ArenaLayout {
        self.layout
    }

    fn ring(&self) {
        fence(Ordering::Release);
        self.ntb.ring();
    }

    fn bell(&self) -> BorrowedFd<'_> {
        self.ntb.as_fd()
    }

    fn answer(&self) -> bool {
        self.ntb.answer()
    }

    fn works(&self) -> bool {
        self.ntb.works()
    }
}
