//! What happened in the rack, with its cause: events as they are made of decisions, refusals and
//! reports, and the bounded log of them.

mod kept;
mod refusals;
mod reports;
mod shares;

use rackbus_lease::{Availability, EndReason, FunctionRecord, LeaseRecord, LeaseState};

use crate::access::RequestOrigin;
use crate::api::{DeviceReport, EventKind, EventRecord, NodeReport, PeerReport};
use crate::usage::LeaseReport;

pub use kept::{KEPT_MS, Log, MOST_EVENTS, MOST_REFUSAL_EVENTS};
pub use refusals::RefusalLimiter;
pub use reports::ReportLimiter;
pub use shares::is_told_by_share;

/// Bytes of an event's text, and of each name in it, at most. A store takes a commit of bounded size only: a longer one
/// would never be stored, and keep those behind it from it.
pub(crate) const LONGEST_TEXT: usize = 2000;

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

    /// Whether it is about a lease.
    pub fn is_of_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Something about no function or lease.
    pub fn of_host(kind: EventKind, host: Option<&str>, text: String) -> Draft {
        let host = host.map(str::to_owned);
        let (function, lease, epoch, by, at_ms) = Default::default();
        Draft { kind, host, function, lease, epoch, by, at_ms, text }
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
            kind,
            host: Some(borrower.clone()),
            function: Some(function.to_string()),
            lease: Some(lease.lease),
            epoch: Some(lease.epoch),
            by: None,
            at_ms: None,
            text,
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
                (kind_of(reason), text)
            }
            LeaseState::Ended { reason } => {
                (kind_of(reason), format!("the lease of {function} to {borrower} ended: {reason}"))
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
            let text = format!("{refused} times {function} let nobody in; the last: {last}");
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
                let text = format!("{function} is well again; before: {trouble}");
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

fn kind_of(reason: &EndReason) -> EventKind {
    match reason {
        EndReason::Returned
        | EndReason::Withdrawn
        | EndReason::TurnOver
        | EndReason::TurnGivenBack => EventKind::Lease,
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
    match event.kind {
        EventKind::Lease | EventKind::Refusal | EventKind::Restart | EventKind::Access => {
            tracing::info!(event = id, by, "{text}");
        }
        EventKind::Loss | EventKind::Fault => tracing::warn!(event = id, by, "{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts(count: usize) -> Vec<Draft> {
        vec![Draft::of_host(EventKind::Restart, None, "again".to_owned()); count]
    }

    #[test]
    fn the_log_is_bounded_by_number_and_age() {
        let mut log = Log::default();
        for now in 1..=3 {
            let events = log.number(now, drafts(MOST_EVENTS / 2));
            let first = log.first_kept(now, events.len());
            log.put(&events, first);
        }
        let kept = log.after(0, None, usize::MAX);
        assert_eq!(kept.len(), MOST_EVENTS);
        assert_eq!(kept[0].id, MOST_EVENTS as u64 / 2 + 1);
        assert_eq!(log.first_kept(2 + KEPT_MS, 0), MOST_EVENTS as u64 + 1, "the older half");
        let last = log.after(0, Some(EventKind::Restart), 2);
        assert_eq!(last.iter().map(|e| e.id).collect::<Vec<_>>(), [14_999, 15_000]);
        assert_eq!(log.after(14_999, None, 10).len(), 1);
        assert!(log.after(0, Some(EventKind::Fault), 10).is_empty());
    }

    #[test]
    fn numbers_go_on_after_all_were_forgotten() {
        let mut log = Log::default();
        let events = log.number(1, drafts(3));
        log.put(&events, 0);
        let next = log.number(2, drafts(1));
        log.put(&next, 4);
        assert_eq!(log.after(0, None, 10), next);
        assert_eq!(next[0].id, 4);
    }

    #[test]
    fn refusals_that_say_the_same_are_counted() {
        let mut refusals = RefusalLimiter::default();
        assert!(refusals.refused(5000, "held", Some("beta"), "held").is_some());
        assert!(refusals.refused(5001, "held", Some("beta"), "held").is_none());
        assert!(refusals.refused(5999, "held", Some("beta"), "held").is_none());
        assert!(refusals.refused(5999, "other", Some("gamma"), "held").is_some());
        let next = refusals.refused(6000, "held", Some("beta"), "held").unwrap();
        assert_eq!(next.text, "held (2 more times since the last)");
    }

    #[test]
    fn repeated_refusals_are_reported_less_and_less_often() {
        let mut refusals = RefusalLimiter::default();
        let mut said = |times: std::ops::Range<u64>| {
            let at = times
                .step_by(100)
                .filter(|now| refusals.refused(*now, "eve", None, "no").is_some());
            at.collect::<Vec<u64>>()
        };
        let hour = 3_600_000;
        let often = said(1000..1000 + hour);
        assert_eq!(often[..5], [1000, 2000, 12_000, 72_000, 672_000]);
        assert_eq!(often.len(), 9, "{often:?}");
        let later = 3 * hour;
        assert_eq!(said(later..later + 5000), [later, later + 1000], "after a quiet time");
    }

    #[test]
    fn refusals_do_not_push_out_other_events() {
        let mut log = Log::default();
        let mut put = |drafts| {
            let events = log.number(1, drafts);
            let first = log.first_kept(1, events.len());
            log.put(&events, first);
            assert_eq!(first, 0);
        };
        put(drafts(5));
        let refusal = || Draft::of_host(EventKind::Refusal, None, "no".to_owned());
        for _ in 0..2 * MOST_EVENTS {
            put(vec![refusal()]);
        }
        put(drafts(1));
        let kept = log.after(0, None, usize::MAX);
        assert_eq!(kept.len(), 6 + MOST_REFUSAL_EVENTS);
        assert!(kept[..5].iter().all(|it| it.kind == EventKind::Restart));
        let newest = 2 * MOST_EVENTS as u64 + 5;
        assert_eq!(kept[5].id, newest + 1 - MOST_REFUSAL_EVENTS as u64, "the oldest are gone");
    }

    #[test]
    fn a_report_makes_events_of_what_is_new_in_it() {
        let report = |dma_refused, trouble: Option<&str>| DeviceReport {
            dma_refused,
            last_refused: Some("DMA to 0x1000".to_owned()),
            trouble: trouble.map(str::to_owned),
            ..DeviceReport::default()
        };
        let texts = |before, now| {
            let drafts = Draft::of_report("alpha", "alpha/nvme0", &before, &now);
            drafts.into_iter().map(|draft| draft.text).collect::<Vec<_>>()
        };
        assert_eq!(texts(report(3, None), report(3, None)), [] as [&str; 0]);
        let refused = "2 accesses of alpha/nvme0 were refused; the last: DMA to 0x1000";
        assert_eq!(texts(report(3, None), report(5, None)), [refused]);
        assert_eq!(texts(report(9, None), report(2, None)), [refused], "it began to count anew");
        let burst = |dma_refused, first: &str| DeviceReport {
            first_refused: Some(first.to_owned()),
            ..report(dma_refused, None)
        };
        let both = "2 accesses of alpha/nvme0 were refused; the first of its burst: DMA to 0x8000; \
                    the last: DMA to 0x1000";
        assert_eq!(texts(report(3, None), burst(5, "DMA to 0x8000")), [both]);
        assert_eq!(texts(report(3, None), burst(5, "DMA to 0x1000")), [refused]);
        let alone = "1 accesses of alpha/nvme0 were refused; the last: DMA to 0x1000";
        assert_eq!(texts(report(3, None), burst(4, "DMA to 0x8000")), [alone]);
        assert_eq!(texts(report(1, None), report(1, Some("hangs"))), ["alpha/nvme0: hangs"]);
        assert_eq!(texts(report(1, Some("hangs")), report(1, Some("hangs"))), [] as [&str; 0]);
        let well = texts(report(1, Some("hangs")), report(1, None));
        assert_eq!(well, ["alpha/nvme0 is well again; before: hangs"]);
    }
    #[test]
    fn what_hosts_have_too_much_of_is_told_whenever_it_has_doubled() {
        let report = |locks: u64| NodeReport {
            over_bounds: [("locks".to_owned(), locks), ("connections".to_owned(), 0)].into(),
            last_over_bounds: (locks > 0).then(|| "beta: too many".to_owned()),
            ..NodeReport::default()
        };
        let texts = |before, now| {
            let drafts = Draft::of_bounds("alpha", &report(before), &report(now));
            drafts.into_iter().map(|draft| draft.text).collect::<Vec<_>>()
        };
        let text = |times: u64| {
            format!(
                "the node of alpha refused other hosts what one of them has too much of: \
                 locks ({times} times so far); the last: beta: too many"
            )
        };
        assert_eq!(texts(0, 0), [] as [&str; 0]);
        assert_eq!(texts(0, 1), [text(1)]);
        assert_eq!(texts(4, 7), [] as [&str; 0]);
        assert_eq!(texts(7, 8), [text(8)]);
        assert_eq!(texts(9, 3), [text(3)], "it began to count anew");
        assert_eq!(texts(9, 0), [] as [&str; 0]);
    }
}
