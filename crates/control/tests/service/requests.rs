//! Requests that cannot be kept, are repeated, or whose callers go.

use super::*;

/// A function that its lender must run whole: no lease is begun, and a composition that could not be borrowed
/// is not saved.
#[tokio::test]
async fn terms_that_cannot_be_kept_are_refused_before_anything_is_decided() {
    let control = Control::start().await;
    let strict = BorrowRequest {
        isolation: Isolation::Strict,
        ..BorrowRequest::new("alpha/accel0.vf1", "beta")
    };
    let error = control.client.borrow_as(&strict).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "inseparable");
    assert!(error.error.starts_with("alpha/accel0.vf1 cannot be borrowed with strict"), "{error}");
    let windows = [(Isolation::Shared, "no_window"), (Isolation::Strict, "contradiction")];
    for (isolation, code) in windows {
        let placement = Some(Placement::Host);
        let in_tree =
            BorrowRequest { isolation, placement, ..BorrowRequest::new("alpha/nvme0", "beta") };
        let error = control.client.borrow_as(&in_tree).await.unwrap_err();
        let ControlClientError::Refused(error) = error else { panic!("{error}") };
        assert_eq!(error.code, code, "{error}");
    }
    let level = Some("x".repeat(1 << 20));
    let long = BorrowRequest { level, ..BorrowRequest::new("alpha/nvme0", "beta") };
    let error = control.client.borrow_as(&long).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "bad_request");
    let spec = CompositionSpec {
        name: "both".to_owned(),
        borrower: "beta".to_owned(),
        functions: vec!["alpha/nvme0".to_owned(), "alpha/accel0.vf1".to_owned()],
        isolation: Isolation::Strict,
    };
    let error = control.client.save_composition(&spec).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "inseparable");
    assert!(control.client.leases(true).await.unwrap().is_empty());
    assert!(control.client.compositions().await.unwrap().is_empty());
    let twice = BorrowAllRequest {
        functions: vec!["alpha/nvme0".to_owned(), "alpha/nvme0".to_owned()],
        borrower: "beta".to_owned(),
        placement: Placement::Lender,
        group: None,
        vm: None,
        wait_ms: None,
        priority: 0,
    };
    let error = control.client.borrow_together(&twice, "k").await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "bad_request");
    // They are noted beside the answer.
    let causes = ["strict isolation", "own PCI tree", "exclude each other", "each once"];
    let told = async {
        loop {
            let refusals = control.events(Some(EventKind::Refusal)).await;
            let is_told = |cause: &str| refusals.iter().any(|it| it.text.contains(cause));
            if causes.into_iter().all(is_told) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("a cause is not told");
    let shared = CompositionSpec { isolation: Isolation::Shared, ..spec };
    control.client.save_composition(&shared).await.unwrap();
}

#[tokio::test]
async fn a_borrow_whose_caller_goes_is_given_back() {
    let control = Control::start().await;
    let request = BorrowRequest::new("alpha/nvme0", "beta");
    let body = serde_json::to_string(&request).unwrap();
    let mut caller = UnixStream::connect(control.path("control.sock")).await.unwrap();
    let head = format!(
        "POST /v1/leases HTTP/1.1\r\nhost: rackbus\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    caller.write_all(head.as_bytes()).await.unwrap();
    control.wait_stage(LeaseStage::Arming).await;
    drop(caller);
    let lease = control.wait_stage(LeaseStage::Closing).await;
    assert_eq!(lease.reason.as_deref(), Some("returned"));
}

/// Two may return a lease at once: who runs the VM, and the node that saw it end.
#[tokio::test]
async fn a_return_is_answered_when_the_function_is_offered_again() {
    let control = Control::start().await;
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    let lease = control.wait_stage(LeaseStage::Arming).await;
    let (number, epoch) = (lease.lease, lease.epoch);
    let device = || "nvme0".to_owned();
    let armed = Message::Armed { incarnation: 1, device: device(), epoch, change: None };
    control.say("alpha", vec![armed]).await.unwrap();
    control.wait_stage(LeaseStage::Opening).await;
    let opened = Message::Opened { lease: number, outcome: Ok("socket".to_owned()) };
    control.say("beta", vec![opened]).await.unwrap();
    borrow.await.unwrap().unwrap();

    let client = control.client.clone();
    let first = tokio::spawn(async move { client.give_back(number).await });
    control.wait_stage(LeaseStage::Closing).await;
    control.say("beta", vec![Message::Closed { lease: number }]).await.unwrap();
    control.wait_stage(LeaseStage::Ended).await;
    let client = control.client.clone();
    let mut second = tokio::spawn(async move { client.give_back(number).await });
    let early = tokio::time::timeout(Duration::from_millis(200), &mut second).await;
    assert!(early.is_err(), "told that it is back, and it is not: {early:?}");
    let revoked = Message::Revoked { incarnation: 1, device: device(), epoch };
    control.say("alpha", vec![revoked]).await.unwrap();
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    let over = control.client.give_back(number).await.unwrap_err().to_string();
    assert!(over.contains("over") || over.contains("returned"), "{over}");
}

/// A request whose answer was lost, because the control plane died or the connection did.
#[tokio::test]
async fn a_repeated_request_gets_the_answer_to_the_first() {
    let store = MemoryStore::default();
    let control = Control::start_with(Some(store.clone())).await;
    let both = async {
        let first = control.ask("POST", "/v1/leases", "k1", BORROW);
        let second = control.ask("POST", "/v1/leases", "k1", BORROW);
        let (first, second, lease) = tokio::join!(first, second, control.activate());
        assert_eq!(first, second, "both wait for one lease");
        (first, lease)
    };
    let (first, lease) = tokio::time::timeout(PATIENCE, both).await.unwrap();
    assert_eq!(first.0, 200, "{}", first.1);
    assert_eq!(control.client.leases(true).await.unwrap().len(), 1, "another lease was made");

    // Another life of the control plane finds the answer.
    let control = Control::start_with(Some(store.clone())).await;
    assert_eq!(control.ask("POST", "/v1/leases", "k1", BORROW).await, first);
    let path = format!("/v1/leases/{}", lease.lease);
    let (back, ()) = tokio::join!(control.ask("DELETE", &path, "k2", ""), async {
        control.wait_stage(LeaseStage::Closing).await;
        control.take_back(&lease).await;
    });
    assert_eq!(back.0, 200, "{}", back.1);
    let control = Control::start_with(Some(store)).await;
    assert_eq!(control.ask("DELETE", &path, "k2", "").await, back);
    assert_eq!(control.ask("POST", "/v1/leases", "k1", BORROW).await, first, "as it was answered");
    let over = control.ask("DELETE", &path, "k3", "").await;
    assert!(over.0 == 409 && over.1.contains("has ended already"), "{over:?}");
    let other = control.ask("DELETE", &path, "k1", "").await;
    assert!(other.0 == 422 && other.1.contains("another request"), "{other:?}");
    let bad = control.ask("DELETE", &path, "a b", "").await;
    assert!(bad.0 == 400 && bad.1.contains("visible"), "{bad:?}");
    assert_eq!(control.client.leases(true).await.unwrap().len(), 1);
}

/// Who has its answer lost and is gone itself leaves no lease, and may ask again.
#[tokio::test]
async fn a_request_whose_caller_goes_is_decided_anew() {
    let control = Control::start().await;
    let mut caller = UnixStream::connect(control.path("control.sock")).await.unwrap();
    let length = BORROW.len();
    let head = format!(
        "POST /v1/leases HTTP/1.1\r\nhost: rackbus\r\nidempotency-key: k\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{BORROW}"
    );
    caller.write_all(head.as_bytes()).await.unwrap();
    let first = control.wait_stage(LeaseStage::Arming).await;
    drop(caller);
    control.wait_stage(LeaseStage::Closing).await;
    control.take_back(&first).await;
    let (again, next) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(again.0, 200, "{}", again.1);
    assert_ne!(next.lease, first.lease);
}
