//! What is asked while the store is busy is stored together. The nodes are played by the test.

use std::sync::{Arc, Condvar, Mutex};

use rackbus_control::api::{BorrowRequest, NodeMessages};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::store::{Commit, MemoryStore, StoreError};
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, Message};

/// How many functions alpha lends: more than there are requests in a test.
const FUNCTIONS: usize = 20;

/// What a store does with its commits, as a test says.
#[derive(Default)]
struct Store {
    state: Mutex<StoreState>,
    changed: Condvar,
}

#[derive(Default)]
struct StoreState {
    busy: bool,
    waits: bool,
    fails: bool,
    commits: usize,
}

impl Store {
    fn judge(&self, commit: &Commit) -> Result<(), StoreError> {
        let mut state = self.state.lock().unwrap();
        while state.busy {
            state.waits = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap();
        }
        state.waits = false;
        if commit.is_empty() {
            return Ok(());
        }
        state.commits += 1;
        match state.fails && !commit.answers.is_empty() {
            true => Err(StoreError::Other("the disk is full".to_owned())),
            false => Ok(()),
        }
    }

    /// Has commits wait until it is told otherwise.
    fn be_busy(&self) {
        self.state.lock().unwrap().busy = true;
    }

    fn is_waited_for(&self) -> bool {
        self.state.lock().unwrap().waits
    }

    fn commits(&self) -> usize {
        self.state.lock().unwrap().commits
    }

    /// Goes on; commits that have something to do with a request's key fail from now on, or not.
    fn go_on(&self, fails: bool) {
        let mut state = self.state.lock().unwrap();
        (state.busy, state.fails) = (false, fails);
        self.changed.notify_all();
    }
}

fn function(nth: usize) -> String {
    format!("alpha/d{nth}")
}

/// A control plane with two hosts whose nodes have registered.
async fn open(store: &Arc<Store>) -> Arc<Service> {
    let device = |nth| InventoryDevice {
        function: function(nth).parse().unwrap(),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    let inventory = Inventory {
        rack: "lab".to_owned(),
        hosts: vec!["alpha".to_owned(), "beta".to_owned()],
        devices: (0..FUNCTIONS).map(device).collect(),
        ..Inventory::default()
    };
    let options = ServiceOptions {
        inventory,
        read_rack: None,
        read_file: None,
        config: Config::default(),
        database: "".into(),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    };
    let judge = store.clone();
    let memory = MemoryStore::default().judged_by(Arc::new(move |commit| judge.judge(commit)));
    let service = Service::open_with(options, Box::new(memory)).unwrap();
    for host in ["alpha", "beta"] {
        let devices = (0..FUNCTIONS).filter(|_| host == "alpha").map(|nth| (format!("d{nth}"), 0));
        let devices = devices.collect();
        let address = host.to_owned();
        let register = Message::Register { incarnation: 1, devices, newest_lease: 0, address };
        say(&service, host, register).await.unwrap();
    }
    service
}

async fn say(
    service: &Service,
    host: &str,
    message: Message,
) -> Result<(), rackbus_control::api::ApiError> {
    service.receive(host, NodeMessages { messages: vec![message], report: None }).await
}

/// Lets everybody ask what they ask until they wait for the answer.
async fn let_them_ask() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_is_asked_while_the_store_is_busy_is_stored_in_one_commit() {
    let store = Arc::new(Store::default());
    let service = open(&store).await;
    store.be_busy();
    let borrow = |nth: usize| {
        let service = service.clone();
        tokio::spawn(async move {
            service.borrow(&BorrowRequest::new(&function(nth), "beta"), None).await
        })
    };
    let first = borrow(0);
    while !store.is_waited_for() {
        tokio::task::yield_now().await;
    }
    let before = store.commits();
    let others: Vec<_> = (1..FUNCTIONS).map(borrow).collect();
    let_them_ask().await;
    assert!(service.leases(true).is_empty(), "nothing is known before it is stored");
    store.go_on(false);
    while service.leases(true).len() < FUNCTIONS {
        tokio::task::yield_now().await;
    }
    let took = store.commits() - before;
    assert!(took <= 4, "{took} commits for {FUNCTIONS} requests");
    let (events, _) = service.events(0, None, usize::MAX);
    for nth in 0..FUNCTIONS {
        let lent = format!("{} is being lent to beta", function(nth));
        assert_eq!(events.iter().filter(|event| event.text == lent).count(), 1, "{lent}");
    }
    assert!(events.windows(2).all(|pair| pair[0].id < pair[1].id), "{events:?}");
    first.abort();
    others.iter().for_each(|task| task.abort());
}

/// A lease of the first function that waits for beta to say that it has opened it.
async fn lend(service: &Arc<Service>) -> tokio::task::JoinHandle<()> {
    let asked = service.clone();
    let borrowed = tokio::spawn(async move {
        asked.borrow(&BorrowRequest::new(&function(0), "beta"), None).await.unwrap();
    });
    while service.leases(true).is_empty() {
        tokio::task::yield_now().await;
    }
    let (incarnation, device, epoch) = (1, "d0".to_owned(), 1);
    let armed = Message::Armed { incarnation, device, epoch, change: None };
    say(service, "alpha", armed).await.unwrap();
    borrowed
}

#[tokio::test]
async fn where_it_cannot_be_stored_none_of_it_has_happened_and_nodes_are_heard_anyway() {
    let store = Arc::new(Store::default());
    let service = open(&store).await;
    let lent = lend(&service).await;
    let borrow = |nth: usize, key: &str| {
        let (service, key) = (service.clone(), Some(key.to_owned()));
        tokio::spawn(async move {
            service.borrow(&BorrowRequest::new(&function(nth), "beta"), key).await
        })
    };
    store.be_busy();
    let first = borrow(1, "a");
    while !store.is_waited_for() {
        tokio::task::yield_now().await;
    }
    // The second repeats the first of these: both are answered by the one lease that there would be. The last one is refused
    // because of a lease that never is.
    let refused = [borrow(2, "b"), borrow(2, "b"), borrow(3, "c"), borrow(3, "d")];
    let heard = {
        let service = service.clone();
        let opened = Message::Opened { lease: 1, outcome: Ok("socket".to_owned()) };
        tokio::spawn(async move { say(&service, "beta", opened).await })
    };
    let_them_ask().await;
    let before = store.commits();
    // What has a key is what the store does not take.
    store.go_on(true);
    assert_eq!(first.await.unwrap().unwrap_err().code, "not_stored");
    for refused in refused {
        assert_eq!(refused.await.unwrap().unwrap_err().code, "not_stored");
    }
    heard.await.unwrap().expect("it is decided again by itself");
    lent.await.unwrap();
    assert!(store.commits() - before >= 2, "they were not stored together first");
    assert_eq!(service.leases(true).len(), 1);
    let (events, _) = service.events(0, None, usize::MAX);
    let told = |text: &str| events.iter().filter(|event| event.text.contains(text)).count();
    assert_eq!((told("beta can use alpha/d0"), told("alpha/d3"), told("was refused")), (1, 1, 0));
    store.go_on(false);
    // The key and the number are as if they had not been used.
    let again = borrow(3, "b");
    while service.leases(true).len() < 2 {
        tokio::task::yield_now().await;
    }
    let lease = service.lease(2).unwrap();
    assert_eq!(lease.function, function(3));
    again.abort();
}

#[tokio::test]
async fn a_refusal_is_told_after_what_it_was_refused_for() {
    let store = Arc::new(Store::default());
    let service = open(&store).await;
    let borrow = |nth: usize| {
        let service = service.clone();
        tokio::spawn(async move {
            service.borrow(&BorrowRequest::new(&function(nth), "beta"), None).await
        })
    };
    store.be_busy();
    let first = borrow(0);
    while !store.is_waited_for() {
        tokio::task::yield_now().await;
    }
    let (granted, refused) = (borrow(1), borrow(1));
    let_them_ask().await;
    store.go_on(false);
    assert_eq!(refused.await.unwrap().unwrap_err().code, "held");
    let (events, _) = service.events(0, None, usize::MAX);
    let place = |text: &str| events.iter().position(|event| event.text.contains(text)).unwrap();
    assert!(place("alpha/d1 is being lent") < place("was refused"), "{events:?}");
    [first, granted].iter().for_each(|task| task.abort());
}
