//! The side that moves data: a borrower's end of a lane.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rackbus_memory::Region;
use rackbus_memory::exchange::lane::{Lane, LaneError, PROOF_BYTES};

use crate::endpoint::{MAX_ADDRESS, RegistrationUse, RmaEndpoint};
use crate::{LaneOffer, RmaError, bytes};

/// Transfers that are under way at most.
const TRANSFERS: usize = 64;

/// Bytes at the end of what was written that are read back where the end of a write does not mean that it has arrived.
const CONFIRMED: usize = 8;

/// A transfer under way.
#[derive(Debug, Clone, Copy)]
struct UnderWay {
    id: u64,
    write: bool,
    offset: usize,
    length: usize,
    /// It reads back the end of a write.
    confirms: bool,
}

/// A borrower's end of a lane to the memory that a lender has offered.
pub struct Initiator {
    provider: String,
    /// `None` when it is closed.
    endpoint: Option<RmaEndpoint>,
    peer: u64,
    base: u64,
    key: u64,
    proof: [u8; PROOF_BYTES],
    /// By their number, by which the endpoint knows them.
    under_way: [Option<UnderWay>; TRANSFERS],
    free: Vec<usize>,
    /// Writes that have ended and are still to be read back.
    unconfirmed: VecDeque<(usize, UnderWay)>,
    /// Whether the end of each write is read back, because the end of a write does not mean that it has arrived.
    confirms: bool,
}

impl std::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Initiator").field("provider", &self.provider).finish_non_exhaustive()
    }
}

fn lane(error: RmaError) -> LaneError {
    LaneError(error.to_string())
}

impl Initiator {
    /// One for what a lender has offered, from the interface with address `from` where addresses are such.
    ///
    /// # Errors
    /// [`RmaError`].
    pub fn open(offer: &LaneOffer, from: Option<IpAddr>) -> Result<Initiator, RmaError> {
        let address = bytes(&offer.address, MAX_ADDRESS).ok_or(RmaError::Offer)?;
        let proof = bytes(&offer.proof, PROOF_BYTES).and_then(|proof| proof.try_into().ok());
        let mut endpoint = RmaEndpoint::open(&offer.provider, from, TRANSFERS)?;
        let peer = endpoint.peer(&address)?;
        Ok(Initiator {
            provider: offer.provider.clone(),
            confirms: !endpoint.delivers(),
            endpoint: Some(endpoint),
            peer,
            base: offer.base,
            key: offer.key,
            proof: proof.ok_or(RmaError::Offer)?,
            under_way: [None; TRANSFERS],
            free: (0..TRANSFERS).rev().collect(),
            unconfirmed: VecDeque::new(),
        })
    }

    /// The same, which reads back the end of each write whatever the provider promises.
    #[must_use]
    pub fn confirming(self) -> Initiator {
        Initiator { confirms: true, ..self }
    }

    /// What is found at the lender if the lane leads there.
    pub fn proof(&self) -> [u8; PROOF_BYTES] {
        self.proof
    }

    /// Begins `transfer` by this number; false when there is no room.
    fn start(&mut self, number: usize, transfer: UnderWay) -> Result<bool, LaneError> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(false) };
        let UnderWay { write, offset, length, confirms, .. } = transfer;
        let write = write && !confirms;
        let back = if confirms { length.saturating_sub(CONFIRMED) } else { 0 };
        let place = (offset + back, length - back);
        let address = self.base.checked_add(place.0 as u64).ok_or_else(|| lane(RmaError::Offer))?;
        let remote = (self.peer, address, self.key);
        endpoint.begin(write, place, remote, number).map_err(lane)
    }

    /// The transfer of this number has ended; its number, unless it is still to be read back.
    fn ended(&mut self, number: usize) -> Option<u64> {
        let transfer = self.under_way.get_mut(number).and_then(Option::take)?;
        if transfer.write && self.confirms && !transfer.confirms {
            self.unconfirmed.push_back((number, UnderWay { confirms: true, ..transfer }));
            return None;
        }
        self.free.push(number);
        Some(transfer.id)
    }
}

impl Lane for Initiator {
    fn provider(&self) -> &str {
        &self.provider
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), LaneError> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        endpoint.register(region, RegistrationUse::Local, 0).map_err(lane)
    }

    fn begin(
        &mut self,
        id: u64,
        write: bool,
        offset: usize,
        length: usize,
    ) -> Result<bool, LaneError> {
        let most = self.endpoint.as_ref().map_or(0, RmaEndpoint::most);
        if length > most {
            return Err(LaneError(format!(
                "{length} bytes at once are more than it moves ({most})"
            )));
        }
        let Some(number) = self.free.pop() else { return Ok(false) };
        let transfer = UnderWay { id, write, offset, length, confirms: false };
        let begun = self.start(number, transfer)?;
        match begun {
            true => self.under_way[number] = Some(transfer),
            false => self.free.push(number),
        }
        Ok(begun)
    }

    fn poll(&mut self, ended: &mut Vec<u64>) -> Result<(), LaneError> {
        loop {
            let mut numbers = [0; 16];
            let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
            let count = endpoint.poll(&mut numbers).map_err(lane)?;
            for number in numbers.iter().take(count) {
                ended.extend(self.ended(*number));
            }
            while let Some((number, transfer)) = self.unconfirmed.pop_front() {
                if !self.start(number, transfer)? {
                    self.unconfirmed.push_front((number, transfer));
                    break;
                }
                self.under_way[number] = Some(transfer);
            }
            if count == 0 {
                return Ok(());
            }
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.endpoint.as_ref().and_then(RmaEndpoint::wake).map(AsFd::as_fd)
    }

    fn rest(&mut self) -> bool {
        self.unconfirmed.is_empty() && self.endpoint.as_mut().is_none_or(RmaEndpoint::rest)
    }

    fn close(&mut self) -> bool {
        self.endpoint.take().is_none_or(RmaEndpoint::close)
    }
}
