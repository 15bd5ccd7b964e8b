//! States that programs of this and of earlier versions wrote, which stay readable: a node that is restarted in place by
//! a newer program continues from them.
//!
//! A file is never changed. A new version of the state adds one ([`rackbus_seeds::stored`]).

use rackbus_pci::FunctionState;
use rackbus_seeds::stored::StoredStates;

use super::super::saved::VERSION;
use super::background::slow_drive;
use super::*;

/// Of version 2 as it was written, and of version 1 the same without what that did not have: fronts that are elsewhere.
const READ: std::ops::RangeInclusive<u32> = 1..=VERSION;

fn stored() -> StoredStates {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/nvme/tests/stored");
    StoredStates::new(folder, "state", VERSION)
}

#[test]
fn a_drive_continues_from_what_each_version_wrote() {
    for version in READ {
        let (nvme, control) = slow_drive();
        let mut host = TestHost::around(nvme);
        host.enable();
        host.create_pair(1, ENTRIES);
        let (source, target) = (host.pages(1), host.pages(1));
        host.poke(source, &[7; 512]);
        let cids = [
            host.submit(1, transfer(IoOpcode::Write, 3, 512, source)),
            host.submit(1, transfer(IoOpcode::Read, 9, 512, target)),
            host.submit(1, transfer(IoOpcode::WriteZeroes, 20, 512, 0)),
        ];
        let delete = host.submit(0, Sqe { cdw10: 1, ..admin(AdminOpcode::DeleteSq) });
        host.poll();
        // The memory and the descriptors are those of this host, which did the same as the one that was stored.
        let saved = host.endpoint.save().unwrap();
        stored().compare(&saved.state.to_bytes().unwrap());
        let (next, medium) = slow_drive();
        medium.lock().unwrap().data = control.lock().unwrap().data.clone();
        host.endpoint = Endpoint::new(Box::new(next));
        let state = FunctionState::from_bytes(stored().read(version).as_bytes()).unwrap();
        host.endpoint.restore(&state, saved.descriptors).unwrap();
        for _ in 0..100 {
            host.poll();
            let mut medium = medium.lock().unwrap();
            if !medium.held.is_empty() {
                medium.finish_one();
            }
        }
        assert_eq!(host.wait(0, delete).status(), Status::SUCCESS, "version {version}");
        let mut ended: Vec<u16> = std::iter::from_fn(|| host.take_completion(1))
            .inspect(|cqe| assert_eq!(cqe.status(), Status::SUCCESS))
            .map(|cqe| cqe.cid)
            .collect();
        ended.sort_unstable();
        assert_eq!(ended, cids, "version {version}: each once");
        assert_eq!(host.peek(target, 512), [0x11; 512]);
        let medium = medium.lock().unwrap();
        assert_eq!(medium.data[3 * 512..4 * 512], [7; 512]);
        assert_eq!(medium.data[20 * 512..21 * 512], [0; 512]);
    }
}
