//! A control plane that lives several times, with nodes that do at once what they are told.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rackbus_control::api::{BorrowRequest, Lease, NodeMessages};
use rackbus_control::service::{DescribedDevice, Inventory, InventoryDevice, OfferedDevice};
use rackbus_control::store::{Commit, MemoryStore, StoreError};
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, Message};
use tokio::task::JoinSet;

pub const DEVICES: [&str; 3] = ["nvme0", "nvme1", "nvme2"];

/// The answers to each key so far.
pub type Answers = Arc<Mutex<BTreeMap<usize, Vec<Lease>>>>;

/// What the rack has, with these devices beside those of its file.
fn inventory(offered: &[OfferedDevice]) -> Inventory {
    let device = |name: &str| InventoryDevice {
        function: format!("alpha/{name}").parse().unwrap(),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    let section = |it: &OfferedDevice| {
        let (text, functions) = (it.section.clone(), vec![it.device.clone()]);
        let described = DescribedDevice { text, functions, listed: false };
        ((it.host.clone(), it.device.clone()), described)
    };
    let names = DEVICES.into_iter().chain(offered.iter().map(|it| it.device.as_str()));
    Inventory {
        sections: offered.iter().map(section).collect(),
        rack: "lab".to_owned(),
        hosts: vec!["alpha".to_owned(), "beta".to_owned()],
        devices: names.map(device).collect(),
        ..Inventory::default()
    }
}

/// One life of the control plane, with nodes that do at once what they are told.
pub struct Life {
    pub service: Arc<Service>,
    /// Nothing that it does is stored any more.
    pub dead: Arc<AtomicBool>,
    pub tasks: JoinSet<()>,
}

impl Life {
    pub fn start(store: &MemoryStore, full: &Arc<AtomicBool>) -> Life {
        let dead = Arc::new(AtomicBool::new(false));
        let judge = {
            let (dead, full) = (dead.clone(), full.clone());
            Arc::new(move |_: &Commit| {
                match dead.load(Ordering::SeqCst) || full.load(Ordering::SeqCst) {
                    true => Err(StoreError::Other("it fails".to_owned())),
                    false => Ok(()),
                }
            })
        };
        let options = ServiceOptions {
            inventory: inventory(&[]),
            read_file: None,
            read_rack: Some(Arc::new(|offered| Ok(inventory(offered)))),
            config: Config { resend: 5, ..Config::default() },
            database: "not used".into(),
            log_lines_left_out: || 0,
            is_node: Arc::new(|_, _| false),
        };
        let store = store.clone().judged_by(judge);
        let service = Service::open_with(options, Box::new(store)).unwrap();
        let mut tasks = JoinSet::new();
        for host in ["alpha", "beta"] {
            tasks.spawn(node(service.clone(), host));
        }
        Life { service, dead, tasks }
    }

    pub fn ask(&mut self, key: usize, answers: &Answers) {
        let (service, answers) = (self.service.clone(), answers.clone());
        self.tasks.spawn(async move {
            let request = BorrowRequest::new(&format!("alpha/{}", DEVICES[key]), "beta");
            if let Ok(lease) = service.borrow(&request, Some(format!("key {key}"))).await {
                answers.lock().unwrap().entry(key).or_default().push(lease);
            }
        });
    }

    /// It dies: what it was doing is not done, and who asked gets no answer.
    pub async fn crash(mut self) {
        self.dead.store(true, Ordering::SeqCst);
        self.tasks.shutdown().await;
    }
}

/// A node: says who it is until that is heard, and does what it is told.
async fn node(service: Arc<Service>, host: &str) {
    let mut told = service.listen(host).unwrap();
    let devices = match host {
        "alpha" => DEVICES.iter().map(|name| ((*name).to_owned(), 0)).collect(),
        _ => BTreeMap::new(),
    };
    let address = host.to_owned();
    let register = Message::Register { incarnation: 1, devices, newest_lease: 0, address };
    let say = async |message: Message| {
        let said = NodeMessages { messages: vec![message], report: None };
        service.receive(host, said).await.is_ok()
    };
    while !say(register.clone()).await {
        tokio::task::yield_now().await;
    }
    while let Some(message) = told.recv().await {
        // What is not heard is asked for again.
        match message {
            Message::Arm { incarnation, device, epoch, .. } => {
                say(Message::Armed { incarnation, device, epoch, change: None }).await;
            }
            Message::Granted(grant) => {
                let outcome = Ok(format!("socket of {}", grant.lease));
                say(Message::Opened { lease: grant.lease, outcome }).await;
            }
            Message::Ended { lease, .. } | Message::TurnOver { lease, .. } => {
                say(Message::Closed { lease }).await;
            }
            Message::Revoke { incarnation, device, epoch } => {
                say(Message::Revoked { incarnation, device, epoch }).await;
            }
            Message::SetLevel { incarnation, device, epoch, number, level } => {
                let outcome = Ok(());
                say(Message::LevelSet { incarnation, device, epoch, number, level, outcome }).await;
            }
            Message::Offer { incarnation, device, number, functions, .. } => {
                let outcome = Ok(functions.into_iter().map(|name| (name, 0)).collect());
                say(Message::Offered { incarnation, device, number, outcome }).await;
            }
            Message::Withdraw { incarnation, device, number, .. } => {
                say(Message::Withdrawn { incarnation, device, number }).await;
            }
            _ => {}
        }
    }
}
