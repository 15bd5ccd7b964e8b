//! The bounded log, refusals that are told less and less often, and what is told of a lease that gets less than its minimum.

use std::collections::BTreeMap;

use super::*;

fn drafts(count: usize) -> Vec<Draft> {
    vec![Draft::of_host(EventKind::Restart, None, "again".to_owned()); count]
}

/// Seconds in which a lease had less than its minimum are told with the first one, and when they have doubled.
#[test]
fn violations_are_told_when_they_begin_and_when_they_have_doubled() {
    let report = |lease: u64, violations: u64| DeviceReport {
        lease: Some(LeaseReport {
            lease,
            level: Some("copy 1 Gbit/s".to_owned()),
            operations: BTreeMap::new(),
            shaping: [("violations", violations), ("promised", 200), ("delivered", 150)]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        }),
        ..DeviceReport::default()
    };
    let told = |before: &DeviceReport, now: &DeviceReport| {
        let drafts = of_lease_reports("alpha", "alpha/accel0.vf1", before, now);
        drafts.into_iter().map(|it| (it.kind, it.lease, it.text)).collect::<Vec<_>>()
    };
    let steps = (0..=9u64).zip(1..);
    let counts =
        steps.filter(|(before, now)| !told(&report(3, *before), &report(3, *now)).is_empty());
    assert_eq!(counts.map(|(_, now)| now).collect::<Vec<u64>>(), [1, 2, 4, 8]);
    let text = "alpha/accel0.vf1 gave lease 3 less than the minimum of `copy 1 Gbit/s` in 5 s so far; of all of \
                it 75.0 %";
    let expected = vec![(EventKind::Fault, Some(3), text.to_owned())];
    assert_eq!(told(&report(3, 1), &report(3, 5)), expected);
    // Those of the lease before are not the next one's.
    assert_eq!(told(&report(2, 9), &report(3, 5)), expected);
    assert!(told(&report(2, 9), &report(3, 0)).is_empty());
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

/// A host was refused a function.
fn refusal(host: &str) -> Draft {
    Draft::of_refused_borrow(host, &["alpha/nvme0"], None, "held")
}

#[test]
fn refusals_that_say_the_same_are_counted() {
    let mut refusals = RefusalLimiter::default();
    assert!(refusals.refused(5000, "held", refusal("beta")).is_some());
    assert!(refusals.refused(5001, "held", refusal("beta")).is_none());
    assert!(refusals.refused(5999, "held", refusal("beta")).is_none());
    assert!(refusals.refused(5999, "other", refusal("gamma")).is_some());
    let next = refusals.refused(6000, "held", refusal("beta")).unwrap();
    assert_eq!(next.text, "beta was refused alpha/nvme0: held (2 more times since the last)");
    assert_eq!(next.function.as_deref(), Some("alpha/nvme0"));
}

#[test]
fn a_refusal_says_of_what_and_why_however_long_the_names_are() {
    let several = Draft::of_refused_borrow(
        "beta",
        &["alpha/nvme0", "alpha/nvme1"],
        Some(Duration::from_millis(20)),
        "held",
    );
    assert_eq!(several.text, "beta was refused alpha/nvme0, alpha/nvme1 after 20 ms: held");
    assert_eq!(several.function, None);
    let none = Draft::of_refused_borrow::<&str>("beta", &[], None, "none is free");
    assert_eq!(none.text, "beta was refused an accelerator: none is free");
    let long = "ä".repeat(10_000);
    let refused = Draft::of_refused_borrow(&long, &[&long], None, "held");
    assert!(refused.text.ends_with(": held") && refused.text.len() <= LONGEST_TEXT, "{refused:?}");
    assert!(refused.function.unwrap().len() <= LONGEST_TEXT);
}

#[test]
fn repeated_refusals_are_reported_less_and_less_often() {
    let mut refusals = RefusalLimiter::default();
    let mut said = |times: std::ops::Range<u64>| {
        let at = times
            .step_by(100)
            .filter(|now| refusals.refused(*now, "eve", refusal("eve")).is_some());
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
    assert_eq!(well, ["alpha/nvme0 works again; before: hangs"]);
}

#[test]
fn an_ntb_that_is_not_used_is_told_of_once_and_when_it_is_used_again() {
    let mut told = BTreeMap::new();
    let mut texts = |why: Option<&str>, is_used: bool| {
        let beta = || "beta".to_owned();
        let report = NodeReport {
            unused_ntbs: why.map(|why| (beta(), why.to_owned())).into_iter().collect(),
            used_ntbs: is_used.then(beta).into_iter().collect(),
            ..NodeReport::default()
        };
        let drafts = Draft::of_ntbs("alpha", &mut told, &report);
        drafts.into_iter().map(|draft| draft.text).collect::<Vec<_>>()
    };
    let nothing = [] as [&str; 0];
    assert_eq!(texts(None, true), nothing);
    assert_eq!(
        texts(Some("it leads elsewhere"), false),
        ["the NTB of alpha to beta is not used: it leads elsewhere"]
    );
    assert_eq!(texts(Some("it leads elsewhere"), false), nothing);
    // Its node was started anew, or its NTB reset.
    assert_eq!(texts(None, false), nothing);
    assert_eq!(texts(Some("it leads elsewhere"), false), nothing);
    assert_eq!(
        texts(Some("it failed"), false),
        ["the NTB of alpha to beta is not used: it failed"]
    );
    assert_eq!(texts(None, true), ["the NTB of alpha to beta works again"]);
    assert_eq!(texts(None, true), nothing);
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

/// A level that no accelerator keeps is refused, and a device that cannot be run is at fault; a record of an older version
/// does not say which.
#[test]
fn a_lease_that_its_lender_refused_is_told_as_a_refusal() {
    let told = |refused: Option<bool>| {
        let mut record = serde_json::json!({
            "lease": 3, "function": "alpha/accel0.vf1", "epoch": 1, "borrower": "beta", "since": 1, "until": 2,
            "state": { "state": "ended", "reason": { "why": "lender_failed", "detail": "3 Gbit/s would fit" } },
        });
        if let Some(refused) = refused {
            record["refused"] = refused.into();
        }
        let record: LeaseRecord = serde_json::from_value(record).unwrap();
        Draft::of_lease(None, &record).map(|draft| draft.kind)
    };
    assert_eq!(told(Some(true)), Some(EventKind::Refusal));
    assert_eq!(told(Some(false)), Some(EventKind::Fault));
    assert_eq!(told(None), Some(EventKind::Fault));
}
