//! Devices for processes of this host: what a process asks for in its session, and what it had when that ends.
//!
//! A process borrows as every user does, by a lease of the control plane's. The lease is its session's: it is
//! returned when the process ends, however that happens. Waiting for the control plane keeps nobody but the one who
//! asks.

use std::sync::Arc;

use rackbus_segment::SessionId;
use rackbus_segment::message::{
    BorrowedEntry, DeviceEntry, MOST_BORROWED, Refusal, Reply, SessionRequest,
};

/// Devices in a reply: with their names, they fit into a packet.
const LISTED: usize = 64;

/// Who borrows for the processes of a host.
pub trait ProgramDevices: Send + Sync {
    /// The rack's devices that can be borrowed, or could if they were free.
    ///
    /// # Errors
    /// When the control plane does not say.
    fn list(&self) -> Result<Vec<DeviceEntry>, Refusal>;

    /// Borrows a device for a user of this host, whose functions reach each other; answers when it can be used.
    ///
    /// # Errors
    /// Why it is not available.
    fn borrow(&self, fdid: u64, strict: bool, user: &str) -> Result<BorrowedEntry, Refusal>;

    /// Returns a lease; answers when the device is offered again, or takes too long for that.
    fn give_back(&self, lease: u64);

    /// Returns leases whose user is gone, for as long as it takes and without being waited for.
    fn abandon(&self, leases: Vec<u64>);

    /// How many leases are being returned: they would be forgotten with this process.
    fn pending(&self) -> usize;
}

/// What a session has borrowed. When it is dropped, all of it is returned.
pub(super) struct Borrowing {
    devices: Arc<dyn ProgramDevices>,
    user: String,
    leases: Vec<u64>,
}

impl Borrowing {
    pub(super) fn new(devices: Arc<dyn ProgramDevices>, session: SessionId) -> Borrowing {
        Borrowing { devices, user: format!("program-{}", session.0), leases: Vec::new() }
    }

    /// The answer to a request that is about devices; nothing for any other.
    pub(super) fn answer(&mut self, request: &SessionRequest) -> Option<Reply> {
        let answer = match *request {
            SessionRequest::ListDevices { skip } => self.list(skip),
            SessionRequest::BorrowDevice { fdid, strict } => self.borrow(fdid, strict),
            SessionRequest::ReturnDevice { lease } => self.give_back(lease),
            _ => return None,
        };
        Some(answer.unwrap_or_else(Reply::Refused))
    }

    fn list(&self, skip: u32) -> Result<Reply, Refusal> {
        let mut devices = self.devices.list()?.into_iter();
        let mut rest = devices.by_ref().skip(usize::try_from(skip).unwrap_or(usize::MAX));
        let list = rest.by_ref().take(LISTED).collect();
        let more = rest.next().is_some();
        Ok(Reply::Devices { list, more })
    }

    fn borrow(&mut self, fdid: u64, strict: bool) -> Result<Reply, Refusal> {
        if self.leases.len() >= MOST_BORROWED as usize {
            return Err(Refusal::TooMany(MOST_BORROWED));
        }
        let borrowed = self.devices.borrow(fdid, strict, &self.user)?;
        self.leases.push(borrowed.lease);
        Ok(Reply::Borrowed(borrowed))
    }

    fn give_back(&mut self, lease: u64) -> Result<Reply, Refusal> {
        let at = self.leases.iter().position(|held| *held == lease).ok_or(Refusal::Stale)?;
        self.leases.remove(at);
        self.devices.give_back(lease);
        Ok(Reply::Done)
    }
}

impl Drop for Borrowing {
    fn drop(&mut self) {
        if !self.leases.is_empty() {
            self.devices.abandon(std::mem::take(&mut self.leases));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use rackbus_segment::message::fabric_device_id;

    use super::*;

    /// A rack of drives, each of which anybody may have once.
    #[derive(Default)]
    struct Drives(Mutex<(Vec<u64>, Vec<u64>)>);

    impl ProgramDevices for Drives {
        fn list(&self) -> Result<Vec<DeviceEntry>, Refusal> {
            Ok((0..130).map(entry).collect())
        }

        fn borrow(&self, fdid: u64, _strict: bool, user: &str) -> Result<BorrowedEntry, Refusal> {
            assert_eq!(user, "program-7");
            let device = (0..130).map(entry).find(|it| it.fdid == fdid);
            let device = device.ok_or(Refusal::NoSuchDevice)?;
            let mut state = self.0.lock().unwrap();
            let lease = state.0.len() as u64 + 1;
            state.0.push(lease);
            Ok(BorrowedEntry { lease, device, socket: "somewhere".to_owned() })
        }

        fn give_back(&self, lease: u64) {
            self.0.lock().unwrap().1.push(lease);
        }

        fn abandon(&self, leases: Vec<u64>) {
            self.0.lock().unwrap().1.extend(leases);
        }

        fn pending(&self) -> usize {
            0
        }
    }

    fn entry(number: u32) -> DeviceEntry {
        let name = format!("nvme{number}");
        let fdid = fabric_device_id(4, &name);
        let function = format!("alpha/{name}");
        DeviceEntry { fdid, function, node: 4, vendor_id: 1, device_id: 2, class: 3, free: true }
    }

    #[test]
    fn a_list_goes_on_until_all_are_named() {
        let borrowing = &mut Borrowing::new(Arc::<Drives>::default(), SessionId(7));
        let mut all = Vec::new();
        loop {
            let skip = all.len() as u32;
            let Some(Reply::Devices { list, more }) =
                borrowing.answer(&SessionRequest::ListDevices { skip })
            else {
                panic!("no list");
            };
            all.extend(list);
            if !more {
                break;
            }
        }
        assert_eq!(all, (0..130).map(entry).collect::<Vec<_>>());
        let beyond = borrowing.answer(&SessionRequest::ListDevices { skip: u32::MAX });
        assert_eq!(beyond, Some(Reply::Devices { list: Vec::new(), more: false }));
    }

    #[test]
    fn what_a_session_has_borrowed_ends_with_it_and_nobody_returns_what_is_anothers() {
        let drives = Arc::<Drives>::default();
        let mut borrowing = Borrowing::new(drives.clone(), SessionId(7));
        let borrow = |borrowing: &mut Borrowing, fdid| {
            borrowing.answer(&SessionRequest::BorrowDevice { fdid, strict: false })
        };
        for number in 0..3 {
            let borrowed = borrow(&mut borrowing, entry(number).fdid);
            assert!(matches!(borrowed, Some(Reply::Borrowed(_))), "{borrowed:?}");
        }
        assert_eq!(borrow(&mut borrowing, 1), Some(Reply::Refused(Refusal::NoSuchDevice)));
        let back = |lease| SessionRequest::ReturnDevice { lease };
        assert_eq!(borrowing.answer(&back(2)), Some(Reply::Done));
        for lease in [2, 99] {
            assert_eq!(borrowing.answer(&back(lease)), Some(Reply::Refused(Refusal::Stale)));
        }
        assert_eq!(borrowing.answer(&SessionRequest::Probe { node: 4 }), None);
        drop(borrowing);
        assert_eq!(drives.0.lock().unwrap().1, [2, 1, 3]);
    }

    #[test]
    fn a_session_has_so_many_devices_and_no_more() {
        let mut borrowing = Borrowing::new(Arc::<Drives>::default(), SessionId(7));
        let borrow = SessionRequest::BorrowDevice { fdid: entry(1).fdid, strict: true };
        for _ in 0..MOST_BORROWED {
            assert!(matches!(borrowing.answer(&borrow), Some(Reply::Borrowed(_))));
        }
        let refused = Some(Reply::Refused(Refusal::TooMany(MOST_BORROWED)));
        assert_eq!(borrowing.answer(&borrow), refused);
    }
}
