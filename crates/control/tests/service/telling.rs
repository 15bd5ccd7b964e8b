//! What the control plane tells of what happened: events, metrics, and bounds of both.

use super::*;

/// The events of three refusals that are alike: one, and those of the others are only counted for a second. Each tells how
/// many were not said since the one before.
fn check_refusals(events: &[&str], text: &str, within: Duration) {
    assert_eq!(events[0], text);
    if within < Duration::from_secs(1) {
        assert_eq!(events, [text]);
    }
    let count = |event: &&str| {
        let more = event.strip_prefix(text).unwrap();
        let more = more
            .strip_prefix(" (")
            .and_then(|more| more.strip_suffix(" more times since the last)"));
        1 + more.map_or(0, |count| count.parse().unwrap())
    };
    let told: u32 = events.iter().map(count).sum();
    assert!(told <= 3, "{events:?}");
}

#[tokio::test]
async fn events_name_what_happened_and_outlive_the_control_plane() {
    let store = MemoryStore::default();
    let control = Control::start_with(Some(store.clone())).await;
    let mut coming = control.client.events(Some(EventKind::Loss), None, true).await.unwrap();
    let (lent, lease) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(lent.0, 200, "{}", lent.1);
    let begun = Instant::now();
    for _ in 0..3 {
        assert_eq!(control.ask("POST", "/v1/leases", "other", BORROW).await.0, 409);
    }
    let refused_within = begun.elapsed();
    let report = |dma_refused| {
        let last_refused = Some("DMA to 0x2000+0x1000: no mapping covers it".to_owned());
        let report = DeviceReport { dma_refused, last_refused, ..Default::default() };
        let report =
            NodeReport { devices: [("nvme0".to_owned(), report)].into(), ..Default::default() };
        NodeMessages { messages: Vec::new(), report: Some(report) }
    };
    for count in [0, 4, 4] {
        control.client.say("alpha", &report(count)).await.unwrap();
    }
    let again = Message::Register {
        incarnation: 2,
        devices: [("nvme0".to_owned(), 1)].into(),
        newest_lease: 1,
        address: "alpha".to_owned(),
    };
    control.say("alpha", vec![again]).await.unwrap();
    let lost = tokio::time::timeout(PATIENCE, coming.next()).await.unwrap().unwrap();
    assert_eq!((lost.lease, lost.epoch), (Some(lease.lease), Some(1)));
    assert!(lost.text.contains("its lender's node was restarted"), "{lost:?}");

    let control = Control::start_with(Some(store)).await;
    let events = control.events(None).await;
    let told = |kind| {
        let of_kind = events.iter().filter(move |event| event.kind == kind);
        of_kind.map(|event| event.text.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(
        told(EventKind::Lease),
        [
            "alpha/nvme0 is offered",
            "alpha/nvme0 is being lent to beta",
            "beta can use alpha/nvme0",
            "alpha/nvme0 is offered again",
        ]
    );
    let refusal = "beta was refused alpha/nvme0: alpha/nvme0 is lent to beta (lease 1)";
    check_refusals(&told(EventKind::Refusal), refusal, refused_within);
    let fault = "4 accesses of alpha/nvme0 were refused; the last: DMA to 0x2000+0x1000: no mapping \
                 covers it";
    assert_eq!(told(EventKind::Fault), [fault]);
    assert_eq!(told(EventKind::Loss), [lost.text.as_str()]);
    let restarts = told(EventKind::Restart);
    let again = "the node of alpha was started again";
    assert!(restarts.contains(&"the node of beta was started") && restarts.contains(&again));
    let started = restarts.iter().filter(|text| text.starts_with("the control plane"));
    assert_eq!(started.count(), 2, "{restarts:?}");
    assert!(events.windows(2).all(|pair| pair[0].id < pair[1].id));
    assert_eq!(control.events(Some(EventKind::Fault)).await.len(), 1);
}

/// A Prometheus asks over the network, and everybody else the API's socket.
#[tokio::test]
async fn what_is_counted_is_served_to_prometheus() {
    let control = Control::start().await;
    let (lent, _) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(lent.0, 200, "{}", lent.1);
    let report = DeviceReport {
        dma_refused: 3,
        dma_refused_by_cause: [("not mapped".to_owned(), 3)].into(),
        ..DeviceReport::default()
    };
    let report = NodeReport {
        devices: [("nvme0".to_owned(), report)].into(),
        shared_memory: [("segments".to_owned(), 2)].into(),
        shared_bytes: [("segments".to_owned(), 8192)].into(),
        channels: [("transactions".to_owned(), 8), ("bytes".to_owned(), 4096)].into(),
        conversations: [("functions".to_owned(), 1)].into(),
        over_bounds: [("locks".to_owned(), 6)].into(),
        ..Default::default()
    };
    let said = NodeMessages { messages: Vec::new(), report: Some(report) };
    let _listening = control.client.listen("alpha", 0).await.unwrap();
    control.client.say("alpha", &said).await.unwrap();
    control.say("alpha", vec![register("alpha", true)]).await.unwrap();

    let text = control.client.metrics().await.unwrap();
    for line in [
        "rackbus_leases{stage=\"active\"} 1.0",
        "rackbus_functions{state=\"lent\"} 1.0",
        "rackbus_node_up{host=\"alpha\"} 1.0",
        "rackbus_node_up{host=\"beta\"} 0.0",
        "rackbus_function_dma_refused_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\",cause=\"not mapped\"} 3",
        "rackbus_events_total{kind=\"fault\"} 1",
        "rackbus_requests_refused_total{} 0",
        "rackbus_log_lines_left_out_total{} 7",
        "rackbus_shared_memory{host=\"alpha\",what=\"segments\"} 2.0",
        "rackbus_shared_memory_bytes{host=\"alpha\",what=\"segments\"} 8192.0",
        "rackbus_channel_transactions_total{host=\"alpha\"} 8",
        "rackbus_channel_bytes_total{host=\"alpha\"} 4096",
        "rackbus_link_conversations{host=\"alpha\",service=\"functions\"} 1.0",
        "rackbus_over_bounds_total{host=\"alpha\",what=\"locks\"} 6",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.contains("rackbus_store_commit_seconds_bucket{le="), "{text}");

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let source = Arc::new(rackbus_control::metrics::MetricsPage::default);
    tokio::spawn(rackbus_control::metrics::serve_on(source, listener));
    let mut scrape = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nhost: rack\r\nconnection: close\r\n\r\n";
    scrape.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    scrape.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("openmetrics-text") && answer.ends_with("# EOF\n"), "{answer}");
}

/// What a node says of itself is kept of, and not more: the rack's events are others' as well, and records are read as a
/// whole.
#[tokio::test]
async fn a_node_fills_neither_the_events_nor_the_records() {
    let control = Control::start().await;
    let first = control.events(None).await[0].id;
    for post in 0..400_u64 {
        let life = |nth| Message::Register {
            incarnation: 2 + post * 50 + nth,
            devices: Default::default(),
            newest_lease: 0,
            address: "alpha".to_owned(),
        };
        control.say("alpha", (0..50).map(life).collect()).await.unwrap();
    }
    let events = control.events(None).await;
    let restarts = events.iter().filter(|event| event.kind == EventKind::Restart).count();
    assert!((100..=250).contains(&restarts), "{restarts} events of 20,000 lives");
    assert_eq!(events[0].id, first);
    control.say("alpha", vec![register_again("alpha", 1 << 20)]).await.unwrap();
    let client = control.client.clone();
    let borrowing = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    let lease = control.wait_stage(LeaseStage::Arming).await;
    let device = || "nvme0".to_owned();
    let change = |number| LevelChange {
        number,
        level: Some("x".repeat(60_000)),
        outcome: Some(Err("y".repeat(3_000))),
    };
    let (incarnation, epoch) = (1 << 20, lease.epoch);
    let armed = Message::Armed { incarnation, device: device(), epoch, change: Some(change(1)) };
    control.say("alpha", vec![armed]).await.unwrap();
    control.wait_stage(LeaseStage::Opening).await;
    let opened = Message::Opened { lease: lease.lease, outcome: Ok("socket".to_owned()) };
    control.say("beta", vec![opened]).await.unwrap();
    borrowing.await.unwrap().unwrap();
    let LevelChange { level, .. } = change(2);
    let set = Message::LevelSet {
        incarnation,
        device: device(),
        epoch,
        number: 2,
        level,
        outcome: Ok(()),
    };
    control.say("alpha", vec![set]).await.unwrap();
    let shown = control.wait_stage(LeaseStage::Active).await.level.unwrap_or_default();
    assert_eq!(shown.len(), LONGEST_LEVEL);
}
