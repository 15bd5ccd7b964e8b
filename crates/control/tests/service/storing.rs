//! A store that fails, or makes the control plane wait: nothing is said before it is stored, and others are answered meanwhile.

use super::*;

/// With one thread for everybody, as on a machine whose other processors are busy.
#[tokio::test]
async fn while_a_decision_is_being_stored_everybody_else_is_answered() {
    let (begun, mut beginning) = tokio::sync::mpsc::unbounded_channel();
    let (failed, failing) = std::sync::mpsc::channel::<()>();
    let failing = std::sync::Mutex::new(failing);
    let judge = Arc::new(move |commit: &Commit| {
        if !commit.records.iter().any(|record| matches!(record, Record::Lease(_))) {
            return Ok(());
        }
        begun.send(()).unwrap();
        // Until the test has looked.
        failing.lock().unwrap().recv().unwrap();
        Err(StoreError::Other("the disk is full".to_owned()))
    });
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    tokio::time::timeout(PATIENCE, beginning.recv()).await.unwrap().unwrap();
    let status = tokio::time::timeout(PATIENCE, control.client.status()).await;
    let status = status.expect("the status has to wait for the disk").unwrap();
    assert!(!borrow.is_finished());
    assert_eq!(status.live_leases, 0, "what is not stored is not told");
    failed.send(()).unwrap();
    let refused = borrow.await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("could not be stored"), "{refused}");
    check_nothing_was_changed(&control).await;
}

#[tokio::test]
async fn a_database_that_somebody_else_keeps_locked_stores_nothing() {
    let control = Control::start().await;
    let other = rusqlite::Connection::open(control.path("control.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let refused = control.client.borrow("alpha/nvme0", "beta").await.unwrap_err().to_string();
    assert!(refused.contains("could not be stored"), "{refused}");
    other.execute_batch("ROLLBACK").unwrap();
    check_nothing_was_changed(&control).await;
}

/// A decision that is made and not stored: it is not decided twice, and not at all.
#[tokio::test]
async fn a_request_that_could_not_be_stored_may_be_repeated() {
    let full = Arc::new(AtomicBool::new(false));
    let judge = {
        let full = full.clone();
        Arc::new(move |_: &Commit| match full.load(Ordering::SeqCst) {
            true => Err(StoreError::Other("the disk is full".to_owned())),
            false => Ok(()),
        })
    };
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    full.store(true, Ordering::SeqCst);
    let (status, refused) = control.ask("POST", "/v1/leases", "k", BORROW).await;
    assert!(status == 503 && refused.contains("the disk is full"), "{refused}");
    full.store(false, Ordering::SeqCst);
    let (again, _) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(again.0, 200, "{}", again.1);
}

/// What nodes report and what was refused is told once: where it cannot be stored then, it is stored later.
#[tokio::test]
async fn what_happens_while_the_store_fails_is_told_when_it_works_again() {
    let full = Arc::new(AtomicBool::new(false));
    let judge = {
        let full = full.clone();
        Arc::new(move |commit: &Commit| match full.load(Ordering::SeqCst) {
            true if !commit.events.is_empty() => {
                Err(StoreError::Other("the disk is full".to_owned()))
            }
            _ => Ok(()),
        })
    };
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    full.store(true, Ordering::SeqCst);
    let refused = DeviceReport { dma_refused: 3, ..Default::default() };
    let devices = [("nvme0".to_owned(), refused)].into();
    let report = Some(NodeReport { devices, ..Default::default() });
    let said = NodeMessages { messages: Vec::new(), report };
    control.client.say("alpha", &said).await.unwrap_err();
    control.client.borrow("alpha/nvme9", "beta").await.unwrap_err();
    full.store(false, Ordering::SeqCst);
    // Nothing has to happen for that: it is tried again.
    let told = async {
        loop {
            let (faults, refusals) =
                (control.events(Some(EventKind::Fault)), control.events(Some(EventKind::Refusal)));
            let (faults, refusals) = tokio::join!(faults, refusals);
            if let ([fault], [refusal]) = (&faults[..], &refusals[..]) {
                return (fault.text.clone(), refusal.text.clone());
            }
            assert!(faults.len() < 2 && refusals.len() < 2, "{faults:?} {refusals:?}");
            tokio::task::yield_now().await;
        }
    };
    let (fault, refusal) = tokio::time::timeout(PATIENCE, told).await.expect("they are lost");
    assert!(fault.starts_with("3 accesses of alpha/nvme0 were refused"), "{fault}");
    assert!(refusal.contains("no host offers alpha/nvme9"), "{refusal}");
    control.client.borrow("alpha/nvme9", "gamma").await.unwrap_err();
    assert_eq!(control.events(Some(EventKind::Fault)).await.len(), 1, "told twice");
}

/// What is said to a node is stored before.
#[tokio::test]
async fn nothing_is_sent_before_it_is_stored() {
    let (stored, storing) = std::sync::mpsc::channel::<()>();
    let storing = std::sync::Mutex::new(storing);
    let judge = Arc::new(move |commit: &Commit| {
        if commit.records.iter().any(|record| matches!(record, Record::Lease(_))) {
            // Until the test has looked.
            storing.lock().unwrap().recv().unwrap();
        }
        Ok(())
    });
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    let mut heard = control.client.listen("alpha", 0).await.unwrap();
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    let early = tokio::time::timeout(Duration::from_millis(200), next_message(&mut heard)).await;
    assert!(early.is_err(), "sent before it is stored: {early:?}");
    assert_eq!(control.client.leases(true).await.unwrap(), []);
    stored.send(()).unwrap();
    let said = tokio::time::timeout(PATIENCE, next_message(&mut heard)).await.unwrap();
    assert!(matches!(said, Some(Message::Arm { .. })), "{said:?}");
    borrow.abort();
    // What follows is stored as it comes.
    (0..100).for_each(|_| stored.send(()).unwrap_or_default());
}
