//! A network function continues in another process, over and over, under drivers that do not notice.

use std::sync::{Arc, Mutex};

use rackbus_devices::nic::{Nic, NicCounters, NicOptions};
use rackbus_driver::net::{Net, NetOptions};
use rackbus_driver::{DmaAddresses, DriveError, DrivenFunction};
use rackbus_memory::{Access, SharedMemory};
use rackbus_net::{LocalNetwork, MacAddress, PortSource};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, FunctionState, Work};
use rackbus_spec::virtio::feature as common;
use rackbus_spec::virtio::net::{NetHeader, feature};

fn model(network: &LocalNetwork, number: u32) -> Box<Nic> {
    let name = format!("alpha/nic0.vf{number}");
    let port = network.port(&name).unwrap();
    let options = NicOptions {
        mac: MacAddress::derived(&name),
        name,
        pairs: 2,
        rate: None,
        packed_rings: true,
    };
    Box::new(Nic::new(&options, Some(port), Arc::new(NicCounters::default())))
}

/// A function that others may save and restore between two accesses.
#[derive(Clone)]
struct Life {
    endpoint: Arc<Mutex<Option<Endpoint>>>,
    network: Arc<LocalNetwork>,
    number: u32,
}

impl Life {
    fn new(network: &Arc<LocalNetwork>, number: u32) -> Life {
        let endpoint = Endpoint::new(model(network, number));
        let endpoint = Arc::new(Mutex::new(Some(endpoint)));
        Life { endpoint, network: network.clone(), number }
    }

    fn with<R>(&self, job: impl FnOnce(&mut Endpoint) -> R) -> R {
        job(self.endpoint.lock().unwrap().as_mut().unwrap())
    }

    /// One poll, with or without a sleep behind it.
    fn poll(&self, sleeps: bool) {
        self.with(|endpoint| {
            let now = endpoint.clock();
            if endpoint.poll(now) != Work::Done && sleeps {
                endpoint.park();
            }
        });
    }

    /// Another process continues with it, from what would be written down.
    fn go_on(&self) {
        let mut slot = self.endpoint.lock().unwrap();
        let saved = slot.as_mut().unwrap().save().unwrap();
        let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
        *slot = None;
        let mut next = Endpoint::new(model(&self.network, self.number));
        next.restore(&state, saved.descriptors).unwrap();
        *slot = Some(next);
    }
}

impl DrivenFunction for Life {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.with(|endpoint| endpoint.read(FunctionRegion::Bar(0), offset, data).unwrap());
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        self.with(|endpoint| endpoint.write(FunctionRegion::Bar(0), offset, data).unwrap());
        Ok(())
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.with(|endpoint| endpoint.read(FunctionRegion::Config, offset, data).unwrap());
        Ok(())
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        self.with(|endpoint| {
            let access = Access::READ | Access::WRITE;
            let length = memory.len() as u64;
            endpoint.map(iova, length, access, Some(memory.handle(0))).unwrap();
            endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        });
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }

    fn progress(&mut self) -> bool {
        self.poll(false);
        true
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// Frames may be lost with a node's rings, and none is changed, doubled or overtaken. What is sent when nobody
/// goes away any more comes.
#[test]
fn a_function_goes_on_at_any_moment() {
    for seed in 0..24u64 {
        let mut random = Random(seed);
        let mut features = !0;
        for (bit, optional) in
            [common::RING_PACKED, common::EVENT_IDX, feature::MRG_RXBUF].into_iter().enumerate()
        {
            if seed >> bit & 1 == 0 {
                features &= !optional;
            }
        }
        let network = Arc::new(LocalNetwork::new([]));
        let lives = [1, 2].map(|number| Life::new(&network, number));
        let options =
            NetOptions { features, size: 16, segments: 2, pairs: 2, ..NetOptions::default() };
        let mut nets =
            [0, 1].map(|n: usize| Net::start(Box::new(lives[n].clone()), options).unwrap());
        let to = nets[1].info().mac;
        let own = nets[0].info().mac;
        let (mut sent, mut last, mut found) = (0u32, None, Vec::new());
        let mut came = 0;
        for step in 0..3000 {
            let quiet = step >= 2500;
            match random.below(12) {
                0 if !quiet => lives[random.below(2) as usize].go_on(),
                1 => lives[random.below(2) as usize].poll(true),
                2..=5 => {
                    let mut frame = [&to[..], &own, &[0x88, 0xb5]].concat();
                    frame.extend(sent.to_le_bytes());
                    frame.resize(18 + (sent % 1000) as usize, sent as u8);
                    if nets[0].send(0, &NetHeader::default(), &frame).unwrap() {
                        nets[0].flush(0).unwrap();
                        sent += 1;
                    }
                }
                _ => {
                    nets[0].unsent(0).unwrap();
                    while nets[1].receive(0, &mut found).unwrap().is_some() {
                        let number = u32::from_le_bytes(found[14..18].try_into().unwrap());
                        assert!(last.is_none_or(|last| number > last), "{number} behind {last:?}");
                        assert_eq!(found[6..12], own);
                        assert_eq!(found.len(), 18 + (number % 1000) as usize);
                        assert!(found[18..].iter().all(|byte| *byte == number as u8));
                        (last, came) = (Some(number), came + 1);
                    }
                }
            }
        }
        for _ in 0..100 {
            nets[0].unsent(0).unwrap();
            while nets[1].receive(0, &mut found).unwrap().is_some() {
                last = Some(u32::from_le_bytes(found[14..18].try_into().unwrap()));
            }
        }
        assert_eq!(last, Some(sent - 1), "seed {seed}: the last frame");
        assert!(came > sent / 4, "seed {seed}: {came} of {sent}");
        assert!(!nets[0].is_broken().unwrap() && !nets[1].is_broken().unwrap());
    }
}
