//! The NTBs of a host, through which its functions are lent to other hosts' own kernels.
//!
//! An NTB is taken and opened when the node's functions are made ready, and stays open until the node ends. When the node is
//! restarted in place, one through which something is lent is passed on as it is; others are opened anew.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rackbus_memory::Stream;
use rackbus_metal::{LentWindow, SavedWindow};
use rackbus_vfio::{Bindings, PciAddress, VfioError};

use super::conversations::Conversations;
use super::locked;

/// How long functions in use may take to be closed when the node ends, and between two looks.
const CLOSING: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(5);

/// The NTBs of this host, by the host that each leads to.
#[derive(Debug, Default)]
pub struct Ntbs {
    addresses: BTreeMap<String, PciAddress>,
    open: Mutex<Open>,
    /// By which functions of the machine are used without an NTB, and end when the NTBs are closed.
    conversations: Conversations,
}

#[derive(Debug, Default)]
struct Open {
    /// By the host that each leads to.
    windows: BTreeMap<String, Arc<LentWindow>>,
    /// The node ends: none is opened any more.
    closed: bool,
}

impl Ntbs {
    /// Those that the rack file names for this host.
    ///
    /// # Errors
    /// When an address is none.
    pub fn new(named: &BTreeMap<String, String>) -> Result<Ntbs, VfioError> {
        let parse = |(host, address): (&String, &String)| Ok((host.clone(), address.parse()?));
        let addresses = named.iter().map(parse).collect::<Result<_, VfioError>>()?;
        Ok(Ntbs { addresses, ..Ntbs::default() })
    }

    /// The PCI addresses of the NTBs, by the host that each leads to.
    pub fn addresses(&self) -> &BTreeMap<String, PciAddress> {
        &self.addresses
    }

    /// The NTB that leads to a host.
    pub fn to(&self, host: &str) -> Option<PciAddress> {
        self.addresses.get(host).copied()
    }

    /// Takes and opens all of them, unless that was done. One that cannot be obtained is told when something is to be lent
    /// through it.
    pub(super) fn open_all(&self, taker: &str) {
        for (host, address) in &self.addresses {
            if let Err(error) = self.window(host, *address, taker) {
                tracing::warn!(host, %address, %error, "the NTB cannot be used at the moment");
            }
        }
    }

    /// Takes note of a conversation in which a function of the machine is used without an NTB.
    ///
    /// # Errors
    /// When the node ends.
    pub(super) fn begin(&self, conversation: &Arc<dyn Stream>) -> io::Result<()> {
        self.conversations.begin(conversation)
    }

    /// Ends the conversations in which functions of the machine are used, takes all functions away that are lent through
    /// the NTBs, and closes these. False when some are in use still, after a while: then nothing of theirs may be given
    /// back to its driver, which would wait for this process.
    pub fn close(&self) -> bool {
        self.conversations.end_all();
        let mut open = locked(&self.open);
        open.closed = true;
        let windows = std::mem::take(&mut open.windows);
        drop(open);
        let begun = Instant::now();
        for (host, window) in windows {
            window.end_all("its node ends");
            // Who is lending just now has the window, too.
            while !window.is_idle() || Arc::strong_count(&window) > 1 {
                if begun.elapsed() > CLOSING {
                    tracing::error!(
                        host,
                        "functions that were lent through the NTB are in use still"
                    );
                    return false;
                }
                std::thread::sleep(AGAIN);
            }
        }
        true
    }

    /// The windows in which something is lent, by the host that each leads to, as another process goes on with them.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn save(&self) -> io::Result<BTreeMap<String, SavedWindow>> {
        let mut all = BTreeMap::new();
        for (host, window) in &locked(&self.open).windows {
            if let Some(saved) = window.save()? {
                all.insert(host.clone(), saved);
            }
        }
        Ok(all)
    }

    /// Goes on with the window to `host` that another process had. Where that fails, nothing of it is reached any more, and
    /// what was lent there is lost.
    ///
    /// # Errors
    /// When the NTB is not the one to that host, or not as it was.
    pub(crate) fn inherit(&self, host: &str, saved: SavedWindow) -> io::Result<()> {
        let ntb = saved.state.ntb();
        if self.to(host) != Some(ntb) {
            return Err(io::Error::other(format!("the NTB {ntb} does not lead to {host}")));
        }
        // It is taken: to bind it anew would wait for this process.
        let facts = Bindings::here().sysfs().facts(ntb).map_err(io::Error::other)?;
        let window = LentWindow::again(facts, saved).map_err(io::Error::other)?;
        locked(&self.open).windows.insert(host.to_owned(), Arc::new(window));
        Ok(())
    }

    /// Takes away what another process lent in the windows and nobody went on with.
    pub(crate) fn end_left(&self) {
        locked(&self.open).windows.values().for_each(|window| window.end_left());
    }

    /// The window to `borrower` that another process had.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn passed_on_to(&self, borrower: &str) -> io::Result<Arc<LentWindow>> {
        let window = locked(&self.open).windows.get(borrower).cloned();
        window.ok_or_else(|| io::Error::other(format!("no window to {borrower} was passed on")))
    }

    /// The window to a host, opened anew where the NTB is not as it was.
    fn window(&self, host: &str, address: PciAddress, taker: &str) -> io::Result<Arc<LentWindow>> {
        // Held while it is opened, which another borrower's functions wait for: it is done once.
        let mut open = locked(&self.open);
        if open.closed {
            return Err(io::Error::other("the node ends"));
        }
        if let Some(window) = open.windows.get(host) {
            if window.works() || !window.is_idle() {
                return Ok(window.clone());
            }
            tracing::warn!(host, %address, "the NTB was reset: it is opened anew");
            open.windows.remove(host);
        }
        let bindings = Bindings::here();
        bindings.load_driver();
        bindings.take(address, taker, false).map_err(io::Error::other)?;
        let facts = bindings.sysfs().facts(address).map_err(io::Error::other)?;
        let window = Arc::new(LentWindow::open(facts).map_err(io::Error::other)?);
        open.windows.insert(host.to_owned(), window.clone());
        Ok(window)
    }

    /// The window that leads to `borrower`, whose NTB is taken for `taker`.
    ///
    /// # Errors
    /// When no NTB leads there, or it cannot be used.
    pub(super) fn window_to(&self, borrower: &str, taker: &str) -> io::Result<Arc<LentWindow>> {
        let address = self.to(borrower).ok_or_else(|| {
            io::Error::other(format!(
                "the rack file names no NTB from this host to {borrower}: write [hosts.HOST.ntb.{borrower}]"
            ))
        })?;
        self.window(borrower, address, taker)
    }
}
