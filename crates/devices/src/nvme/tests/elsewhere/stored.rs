//! States in files: a controller at the borrower, and the drive that it is about, continue from each of them. Before
//! version 2 there were none.

use rackbus_memory::InheritedEnd;
use rackbus_pci::FunctionState;
use rackbus_seeds::stored::StoredStates;

use super::super::super::saved::VERSION;
use super::*;

fn stored(name: &'static str) -> StoredStates {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/nvme/tests/elsewhere/stored");
    StoredStates::new(folder, name, VERSION)
}

fn read(name: &'static str, version: u32) -> FunctionState {
    FunctionState::from_bytes(stored(name).read(version).as_bytes()).unwrap()
}

#[test]
fn both_ends_continue_from_what_each_version_wrote() {
    for version in 2..=VERSION {
        let mut apart = Apart::new();
        let (source, target) = (apart.host.pages(1), apart.host.pages(1));
        apart.host.poke(source, &[7; 512]);
        let cids = [
            apart.host.submit(1, transfer(IoOpcode::Write, 3, 512, source)),
            apart.host.submit(1, transfer(IoOpcode::Read, 9, 512, target)),
            apart.host.submit(1, transfer(IoOpcode::WriteZeroes, 20, 512, 0)),
        ];
        apart.host.poll();
        apart.lender.poll(0);
        assert_eq!(apart.control.lock().unwrap().held.len(), cids.len());
        // The memory and the descriptors are those of these two, which did the same as the ones that were stored.
        let front = apart.host.endpoint.save().unwrap();
        let lender = apart.lender.save().unwrap();
        stored("front").compare(&front.state.to_bytes().unwrap());
        stored("lender").compare(&lender.state.to_bytes().unwrap());
        let end = InheritedEnd { files: front.medium, session: None };
        let next = medium::front_again(&apart.description, end, Lost::new(|| {})).unwrap();
        apart.host.endpoint = Endpoint::new(Box::new(next));
        apart.host.endpoint.restore(&read("front", version), front.descriptors).unwrap();
        let (mut next, control) = slow_drive();
        control.lock().unwrap().data = apart.control.lock().unwrap().data.clone();
        next.left.files = lender.medium;
        apart.lender = Endpoint::new(Box::new(next));
        apart.lender.restore(&read("lender", version), lender.descriptors).unwrap();
        apart.control = control;
        for _ in 0..100 {
            apart.host.poll();
            apart.lender.poll(0);
            let mut control = apart.control.lock().unwrap();
            if !control.held.is_empty() {
                control.finish_one();
            }
        }
        let mut ended: Vec<u16> = std::iter::from_fn(|| apart.host.take_completion(1))
            .inspect(|cqe| assert_eq!(cqe.status(), Status::SUCCESS))
            .map(|cqe| cqe.cid)
            .collect();
        ended.sort_unstable();
        assert_eq!(ended, cids, "version {version}: each once");
        assert_eq!(apart.host.peek(target, 512), [0x11; 512]);
        let control = apart.control.lock().unwrap();
        assert_eq!(control.data[3 * 512..4 * 512], [7; 512]);
        assert_eq!(control.data[20 * 512..21 * 512], [0; 512]);
        drop(control);
        assert_eq!(apart.write(), Status::SUCCESS);
    }
}
