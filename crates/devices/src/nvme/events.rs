//! Asynchronous events (NVM Express base 1.4, section 5.2): what the controller tells the host
//! without being asked, through requests that the host left with it.

use std::collections::VecDeque;

use rackbus_pci::RestoreError;
use rackbus_spec::nvme::features::{AsyncEvent, EVENT_ERROR, EVENT_SMART};
use rackbus_spec::nvme::log;
use serde::{Deserialize, Serialize};

use super::saved::require;

/// Requests that the host may leave with the controller: AERL + 1.
pub const REQUEST_LIMIT: usize = 4;
/// Events kept while nobody asks; more of them say nothing new.
const EVENT_LIMIT: usize = 16;

/// Outstanding requests and events.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Events {
    /// Command identifiers of the requests.
    requests: VecDeque<u16>,
    /// Requests that were aborted and not completed yet.
    aborted: VecDeque<u16>,
    #[serde(with = "numbers")]
    waiting: VecDeque<AsyncEvent>,
    /// Event types reported and not cleared by reading their log page, a bit each.
    masked: u8,
}

/// Events as their numbers.
mod numbers {
    use std::collections::VecDeque;

    use rackbus_spec::nvme::features::AsyncEvent;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(
        events: &VecDeque<AsyncEvent>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(events.iter().map(|event| u32::from(*event)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<VecDeque<AsyncEvent>, D::Error> {
        let numbers = Vec::<u32>::deserialize(from)?;
        Ok(numbers.into_iter().map(AsyncEvent::from).collect())
    }
}

/// A request beyond the limit.
#[derive(Debug, PartialEq, Eq)]
pub struct LimitExceeded;

impl Events {
    /// Whether requests and events that were saved can be.
    ///
    /// # Errors
    /// When there are more than are kept.
    pub fn check(&self) -> Result<(), RestoreError> {
        let requests = self.requests.len() + self.aborted.len();
        let fits = requests <= REQUEST_LIMIT && self.waiting.len() <= EVENT_LIMIT;
        require(fits, "too many events or requests for them")
    }

    /// Takes a request of the host.
    ///
    /// # Errors
    /// [`LimitExceeded`] when it has as many outstanding as it may.
    pub fn request(&mut self, cid: u16) -> Result<(), LimitExceeded> {
        // An aborted request is outstanding until its completion was posted.
        if self.requests.len() + self.aborted.len() >= REQUEST_LIMIT {
            return Err(LimitExceeded);
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Aborts the request with `cid`; false when there is none.
    pub fn abort(&mut self, cid: u16) -> bool {
        let at = self.requests.iter().position(|request| *request == cid);
        let request = at.and_then(|at| self.requests.remove(at));
        self.aborted.extend(request);
        request.is_some()
    }

    /// The next request that was aborted and is to be completed as such.
    pub fn next_aborted(&mut self) -> Option<u16> {
        self.aborted.pop_front()
    }

    /// Something happened. The same event is kept once.
    pub fn raise(&mut self, event_type: u8, info: u8) {
        let log_page = match event_type {
            EVENT_SMART => log::SMART_HEALTH,
            _ => log::ERROR_INFORMATION,
        };
        let event =
            AsyncEvent::new().with_event_type(event_type).with_info(info).with_log_page(log_page);
        if !self.waiting.contains(&event) && self.waiting.len() < EVENT_LIMIT {
            self.waiting.push_back(event);
        }
    }

    /// The next event to report, with the request that it completes. Further events of its type
    /// wait until the host has read the log page.
    pub fn next(&mut self) -> Option<(u16, AsyncEvent)> {
        let masked = self.masked;
        let at = self.waiting.iter().position(|event| masked & 1 << event.event_type() == 0)?;
        let cid = self.requests.pop_front()?;
        let event = self.waiting.remove(at)?;
        self.masked |= 1 << event.event_type();
        Some((cid, event))
    }

    /// Whether there is a request to complete.
    #[inline]
    pub fn has_next(&self) -> bool {
        !self.aborted.is_empty()
            || !self.requests.is_empty()
                && self.waiting.iter().any(|event| self.masked & 1 << event.event_type() == 0)
    }

    /// The host read `log_page` and did not ask to retain the event.
    pub fn log_was_read(&mut self, log_page: u8) {
        self.masked &= match log_page {
            log::ERROR_INFORMATION => !(1 << EVENT_ERROR),
            log::SMART_HEALTH => !(1 << EVENT_SMART),
            _ => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_waits_for_a_request_and_then_masks_its_type() {
        let mut events = Events::default();
        events.raise(EVENT_ERROR, 0);
        events.raise(EVENT_ERROR, 0);
        events.raise(EVENT_ERROR, 1);
        assert_eq!(events.next(), None);
        events.request(7).unwrap();
        events.request(8).unwrap();
        let (cid, event) = events.next().unwrap();
        assert_eq!((cid, event.info(), event.log_page()), (7, 0, log::ERROR_INFORMATION));
        assert_eq!(events.next(), None, "masked until the log is read");
        events.log_was_read(log::SMART_HEALTH);
        assert!(!events.has_next());
        events.log_was_read(log::ERROR_INFORMATION);
        assert_eq!(events.next().map(|(cid, event)| (cid, event.info())), Some((8, 1)));
    }

    #[test]
    fn requests_are_limited_and_can_be_aborted() {
        let mut events = Events::default();
        for cid in 0..REQUEST_LIMIT as u16 {
            events.request(cid).unwrap();
        }
        assert_eq!(events.request(9), Err(LimitExceeded));
        assert!(events.abort(2));
        assert!(!events.abort(2));
        assert!(events.has_next());
        assert_eq!(events.request(9), Err(LimitExceeded), "the aborted one is not completed");
        assert_eq!(events.next_aborted(), Some(2));
        assert!(!events.has_next());
        assert_eq!(events.request(9), Ok(()));
    }
}
