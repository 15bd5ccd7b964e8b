//! What happened in the rack, with its cause: events as they are made of decisions, refusals and
//! reports, and the bounded log of them.

mod kept;
mod refusals;
mod reports;
mod shares;
mod silences;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use rackbus_lease::{Availability, EndReason, FunctionRecord, LeaseRecord, LeaseState};

use crate::access::RequestOrigin;
use crate::api::{DeviceReport, EventKind, EventRecord, NodeReport, PeerReport};
use crate::usage::LeaseReport;

pub use kept::{KEPT_MS, Log, MOST_EVENTS, MOST_REFUSAL_EVENTS};
pub use refusals::RefusalLimiter;
pub use reports::ReportLimiter;
pub use shares::is_told_by_share;
pub(crate) use silences::left_the_rack;
pub use silences::{LastHeard, SilentNodes};

/// Bytes of an event's text, and of each name in it, at most. A store takes a commit of bounded size only: a longer one
/// would never be stored, and keep those behind it from it.
pub(crate) const LONGEST_TEXT: usize = 2000;

/// Bytes of each part of a text that is made of what a caller said, at most.
const LONGEST_PART: usize = 500;

/// As much of a text as an event takes that is to be no longer than `most` bytes.
pub(crate) fn shortened(text: &str, most: usize) -> &str {
    let mut ends = (0..=text.len().min(most)).rev();
    &text[..ends.find(|end| text.is_char_boundary(*end)).unwrap_or(0)]
}

/// An event that has no number yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Draft {
    kind: EventKind,
    host: Option<String>,
    function: Option<String>,
    lease: Option<u64>,
    epoch: Option<u64>,
    by: Option<RequestOrigin>,
    /// When it was, where that is not when it is stored.
    at_ms: Option<u64>,
    text: String,
    /// It tells of an NTB, as whoever has the cable brings it about.
    is_of_ntb: bool,
}

impl Draft {
    /// The host whose node was started again, where it tells of that.
    pub fn restarted(&self) -> Option<&str> {
        self.host.as_deref().filter(|_| self.kind == EventKind::Restart)
    }

    /// That `asker` asked for it.
    #[must_use]
    pub fn by(self, asker: Option<RequestOrigin>) -> Draft {
        Draft { by: asker, ..self }
    }

    /// That it was at this time, and is stored later.
    #[must_use]
    pub fn at(self, at_ms: u64) -> Draft {
        Draft { at_ms: Some(at_ms), ..self }
    }

    /// The same, as short as an event is to be: what nodes and callers say has any length.
    #[must_use]
    pub fn bounded(mut self) -> Draft {
        let names = [self.host.as_mut(), self.function.as_mut()].into_iter().flatten();
        for text in names.chain([&mut self.text]) {
            let length = shortened(text, LONGEST_TEXT).len();
            text.truncate(length);
        }
        self
    }

    /// A host was refused the functions that it asked for, or an accelerator where it named none: at once, or when it had
    /// `waited` for them.
    pub fn of_refused_borrow<F: Display>(
        borrower: &str,
        wanted: &[F],
        waited: Option<Duration>,
        cause: &str,
    ) -> Draft {
        let names: Vec<String> = wanted.iter().map(F::to_string).collect();
        let what = match names.is_empty() {
            true => "an accelerator".to_owned(),
            false => names.join(", "),
        };
        let waited = waited.map(|waited| format!(" after {} ms", waited.as_millis()));
        let waited = waited.unwrap_or_default();
        // Each is bounded by itself, so that a long name does not leave out why.
        let [who, what, cause] = [borrower, &what, cause].map(|it| shortened(it, LONGEST_PART));
        let text = format!("{who} was refused {what}{waited}: {cause}");
        let function = names.into_iter().next().filter(|_| wanted.len() == 1);
        Draft { function, ..Draft::of_host(EventKind::Refusal, Some(borrower), text) }.bounded()
    }

    /// What it tells, for people.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is about a lease.
    pub fn is_of_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Something about no function or lease.
    pub fn of_host(kind: EventKind, host: Option<&str>, text: String) -> Draft {
        let host = host.map(str::to_owned);
        let (function, lease, epoch, by, at_ms, is_of_ntb) = Default::default();
        Draft { kind, host, function, lease, epoch, by, at_ms, text, is_of_ntb }
    }

    /// Something about a function that no lease has to do with.
    pub fn of_function(kind: EventKind, host: &str, function: &str, text: String) -> Draft {
        let function = Some(function.to_owned());
        Draft { function, ..Draft::of_host(kind, Some(host), text) }
    }

    /// The node of `host` was restarted in place, and answered nobody for so many microseconds.
    pub fn of_restart_in_place(host: &str, pause_us: u64) -> Draft {
        let ms = pause_us as f64 / 1e3;
        let text = format!(
            "the node of {host} was restarted in place; what it lends and borrows paused for {ms:.1} ms"
        );
        Draft::of_host(EventKind::Restart, Some(host), text)
    }

    /// A lease's new state. Nothing where it is not news.
    pub fn of_lease(before: Option<&LeaseRecord>, lease: &LeaseRecord) -> Option<Draft> {
        let LeaseRecord { function, borrower, .. } = lease;
        let of = |(kind, text)| Draft {
            lease: Some(lease.lease),
            epoch: Some(lease.epoch),
            ..Draft::of_function(kind, borrower, &function.to_string(), text)
        };
        if let Some(before) = before.filter(|before| before.state == lease.state) {
            return new_level(before, lease).map(of);
        }
        Some(of(match &lease.state {
            LeaseState::Arming if before.is_none() => {
                (EventKind::Lease, format!("{function} is being lent to {borrower}"))
            }
            // Between the decision and the use.
            LeaseState::Arming | LeaseState::Opening => return None,
            LeaseState::Active { .. } => {
                (EventKind::Lease, format!("{borrower} can use {function}"))
            }
            LeaseState::Closing { reason, .. } => {
                let text = format!("{borrower} is asked to release {function}: {reason}");
                (kind_of(reason, lease.refused), text)
            }
            LeaseState::Ended { reason } => {
                let text = format!("the lease of {function} to {borrower} ended: {reason}");
                (kind_of(reason, lease.refused), text)
            }
        }))
    }

    /// A function's new state, as far as its lease does not tell it.
    pub fn of_state(before: Option<&FunctionRecord>, record: &FunctionRecord) -> Option<Draft> {
        let FunctionRecord { function, epoch, state } = record;
        let (kind, text) = match (before.map(|before| &before.state), state) {
            (None, Availability::Offered) => (EventKind::Lease, "is offered"),
            (Some(Availability::Offered), Availability::Offered) => return None,
            (_, Availability::Offered) => (EventKind::Lease, "is offered again"),
            (before, Availability::Withdrawn) if before != Some(&Availability::Withdrawn) => {
                (EventKind::Loss, "is no longer offered by its host")
            }
            _ => return None,
        };
        let text = format!("{function} {text}");
        let draft = Draft::of_function(kind, &function.host, &function.to_string(), text);
        Some(Draft { epoch: Some(*epoch), ..draft })
    }

    /// What is new in what a node says of a function.
    pub fn of_report(
        host: &str,
        function: &str,
        before: &DeviceReport,
        now: &DeviceReport,
    ) -> Vec<Draft> {
        let event = |kind, text| Draft::of_function(kind, host, function, text);
        let mut drafts = Vec::new();
        // A smaller count is one that began anew: its engine, or its node, was started again.
        let new = |now: u64, before: u64| if now < before { now } else { now - before };
        let refused = new(now.dma_refused, before.dma_refused);
        if refused > 0 {
            let last = now.last_refused.as_deref().unwrap_or("unknown");
            // Of one alone, and of a node that does not say, the last is all that there is to tell.
            let first = now.first_refused.as_deref().filter(|first| refused > 1 && *first != last);
            let first = first.map(|first| format!("the first of its burst: {first}; "));
            let first = first.unwrap_or_default();
            let text =
                format!("{refused} accesses of {function} were refused; {first}the last: {last}");
            drafts.push(event(EventKind::Fault, text));
        }
        let refused = new(now.attach_refused, before.attach_refused);
        if refused > 0 {
            let last = now.last_attach_refused.as_deref().unwrap_or("unknown");
            let text = format!(
                "{refused} attempts to attach to {function} were refused; the last: {last}"
            );
            drafts.push(event(EventKind::Refusal, text));
        }
        drafts.extend(of_lease_reports(host, function, before, now));
        let link = |report: &DeviceReport| report.link.clone().unwrap_or_default();
        let (earlier, link) = (link(before), link(now));
        let resumed = new(link.resumed, earlier.resumed);
        if resumed > 0 {
            let times =
                if resumed > 1 { format!("{resumed} times; the last") } else { String::new() };
            let text = format!(
                "the link to {function} was lost and resumed {times} after {:.1} s, {} operations repeated",
                link.last_lost_ms as f64 / 1e3,
                new(link.repeated, earlier.repeated),
            );
            drafts.push(event(EventKind::Loss, text.replace("  ", " ")));
        }
        let (was, lane) = (earlier.lane.unwrap_or_default(), link.lane.unwrap_or_default());
        let provider = &lane.provider;
        match &lane.lost {
            Some(why) if was.lost.as_ref() != Some(why) => {
                let text = format!(
                    "the RDMA lane of {function} ({provider}) is lost: {why}; its data are sent over the link"
                );
                drafts.push(event(EventKind::Loss, text));
            }
            None if lane.up && !(was.up && was.provider == lane.provider) => {
                let text = format!("data of {function} move by an RDMA lane ({provider})");
                drafts.push(event(EventKind::Lease, text));
            }
            _ => {}
        }
        match (&before.trouble, &now.trouble) {
            (before, Some(trouble)) if before.as_ref() != Some(trouble) => {
                drafts.push(event(EventKind::Fault, format!("{function}: {trouble}")));
            }
            (Some(trouble), None) => {
                let text = format!("{function} works again; before: {trouble}");
                drafts.push(event(EventKind::Fault, text));
            }
            _ => {}
        }
        drafts
    }

    /// What a node refused other hosts that had too much of it. One that goes on is told again whenever it has doubled.
    pub fn of_bounds(host: &str, before: &NodeReport, now: &NodeReport) -> Vec<Draft> {
        let news = now.over_bounds.iter().filter_map(|(what, count)| {
            let earlier = before.over_bounds.get(what).copied().unwrap_or_default();
            if count.checked_ilog2() <= earlier.checked_ilog2() && *count >= earlier {
                return None;
            }
            // A count that is smaller is one that began anew.
            (*count > 0).then(|| format!("{what} ({count} times so far)"))
        });
        let news: Vec<String> = news.collect();
        if news.is_empty() {
            return Vec::new();
        }
        let last = now.last_over_bounds.as_ref();
        let last = last.map_or_else(String::new, |last| format!("; the last: {last}"));
        let text = format!(
            "the node of {host} refused other hosts what one of them has too much of: {}{last}",
            news.join(", ")
        );
        vec![Draft::of_host(EventKind::Refusal, Some(host), text)]
    }

    /// What is new in which NTBs a node does not use for its link. `told`: why each was not used, as it was told last, until it is
    /// told that the NTB works again. It is when it is used: a node that was started anew knows nothing of its NTBs at first.
    pub fn of_ntbs(
        host: &str,
        told: &mut BTreeMap<String, String>,
        now: &NodeReport,
    ) -> Vec<Draft> {
        let well: Vec<String> = { told.keys() }
            .filter(|peer| now.used_ntbs.contains(*peer) && !now.unused_ntbs.contains_key(*peer))
            .cloned()
            .collect();
        let mut texts = Vec::new();
        for (peer, why) in &now.unused_ntbs {
            if told.insert(peer.clone(), why.clone()).as_ref() != Some(why) {
                texts.push(format!("the NTB of {host} to {peer} is not used: {why}"));
            }
        }
        for peer in well {
            told.remove(&peer);
            texts.push(format!("the NTB of {host} to {peer} works again"));
        }
        let draft =
            |text| Draft { is_of_ntb: true, ..Draft::of_host(EventKind::Fault, Some(host), text) };
        texts.into_iter().map(draft).collect()
    }

    /// What is new in what a borrower's node says that a function does not reach of others.
    pub fn of_peers(
        host: &str,
        function: &str,
        before: &PeerReport,
        now: &PeerReport,
    ) -> Vec<Draft> {
        let new = now.refused.iter().filter(|refused| !before.refused.contains(refused));
        let event =
            |text: &String| Draft::of_function(EventKind::Refusal, host, function, text.clone());
        new.map(event).collect()
    }
}

/// What is new in what a node says of a function's leases: a minimum that was not kept, and what one used that ended.
fn of_lease_reports(
    host: &str,
    function: &str,
    before: &DeviceReport,
    now: &DeviceReport,
) -> Vec<Draft> {
    let event = |kind, lease: &LeaseReport, text| Draft {
        lease: Some(lease.lease),
        ..Draft::of_function(kind, host, function, text)
    };
    let mut drafts = Vec::new();
    let ended = now.last_lease.as_ref();
    let known = before.last_lease.as_ref().map(|ended| ended.lease);
    if let Some(lease) = ended.filter(|lease| Some(lease.lease) != known) {
        let text = format!("what lease {} of {function} used: {}", lease.lease, lease.summary());
        drafts.push(event(EventKind::Lease, lease, text));
    }
    if let Some(lease) = &now.lease {
        let earlier = before.lease.as_ref().filter(|before| before.lease == lease.lease);
        let earlier = earlier.map_or(0, |before| before.shaped("violations"));
        let violations = lease.shaped("violations");
        // One that goes on is told again whenever it has doubled.
        if violations.checked_ilog2() > earlier.checked_ilog2() {
            let text = format!(
                "{function} gave lease {} less than the minimum of `{}` in {violations} s so far; of all of it \
                 {:.1} %",
                lease.lease,
                lease.level.as_deref().unwrap_or_default(),
                lease.kept().unwrap_or(1.0) * 100.0,
            );
            drafts.push(event(EventKind::Fault, lease, text));
        }
    }
    drafts
}

/// What a lender answered that was asked for another service level.
fn new_level(before: &LeaseRecord, lease: &LeaseRecord) -> Option<(EventKind, String)> {
    let LeaseRecord { function, borrower, .. } = lease;
    let change = lease.change.as_ref().filter(|_| lease.change != before.change)?;
    let name = |level: &Option<String>| match level {
        Some(level) => format!("the level `{level}`"),
        None => "no level of its own".to_owned(),
    };
    let (asked, had) = (name(&change.level), name(&before.level));
    Some(match change.outcome.as_ref()? {
        Ok(()) => {
            let text = format!("{borrower} has {asked} of {function} from now on; before: {had}");
            (EventKind::Lease, text)
        }
        Err(reason) => {
            let text = format!(
                "{borrower} was refused {asked} of {function}, and goes on with {had}: {reason}"
            );
            (EventKind::Refusal, text)
        }
    })
}

/// What kind of event the end of a lease is, which its lender `refused` or not.
fn kind_of(reason: &EndReason, refused: bool) -> EventKind {
    match reason {
        EndReason::Returned
        | EndReason::Withdrawn
        | EndReason::TurnOver
        | EndReason::TurnGivenBack => EventKind::Lease,
        EndReason::LenderFailed(_) if refused => EventKind::Refusal,
        EndReason::LenderFailed(_) | EndReason::BorrowerFailed(_) => EventKind::Fault,
        EndReason::Expired
        | EndReason::BorrowerRestarted
        | EndReason::LenderLost(_)
        | EndReason::LenderRestarted
        | EndReason::RecordsLost => EventKind::Loss,
    }
}

/// What is logged about a lease, in whatever process: its lines are found by its number.
pub fn lease_span(lease: u64) -> tracing::Span {
    tracing::info_span!("lease", id = lease)
}

/// Logs an event that is stored.
pub fn log(event: &EventRecord) {
    let _about = event.lease.map(|lease| lease_span(lease).entered());
    let EventRecord { id, text, .. } = event;
    let by = event.by.as_ref().map(tracing::field::display);
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(event = id, by, "{text}")
        };
    }
    // Each kind is said at a place of its own: a place in the source may write so many lines in a while, and neither what
    // somebody is refused again and again, nor a device with many functions, is to keep leases and losses out of the log.
    match event.kind {
        EventKind::Lease if event.lease.is_some() => line!(info),
        EventKind::Lease => line!(info),
        EventKind::Refusal => line!(info),
        EventKind::Restart => line!(info),
        EventKind::Access => line!(info),
        EventKind::Loss => line!(warn),
        EventKind::Fault => line!(warn),
    }
}

#[cfg(test)]
mod tests;
