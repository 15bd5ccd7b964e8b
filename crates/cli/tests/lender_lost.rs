//! The lender killed: how soon its absence is seen, and what is told of it.
//!
//! Alone in its program, for it measures time: programs of tests run one after the other.

mod support;

use std::time::{Duration, Instant};

use rackbus_control::api::{DeviceState, LeaseStage};
use rackbus_pci::vfio_user::Client;
use support::{PATIENCE, Rack, THREE_HOSTS, socket};

/// How often the lender is killed.
const ROUNDS: usize = 11;
/// How often that is tried.
const SERIES: usize = 4;

#[test]
fn a_lender_that_dies_leaves_all_ones_and_a_reason() {
    let mut rack = Rack::up(THREE_HOSTS);
    let mut series = Vec::new();
    for _ in 0..SERIES {
        let times = times_until_all_ones(&mut rack);
        // What else runs on the machine may hold up some, and makes all of a series slow while it is busy: one series
        // counts, and the median of that. Whatever waits for something would take longer each time.
        if times[0] < Duration::from_millis(20) && times[ROUNDS / 2] < Duration::from_millis(100) {
            return;
        }
        series.push(times);
    }
    panic!("all ones after {series:?}");
}

/// Kills the lender again and again; how long it took each time until its function was all ones, the shortest first.
fn times_until_all_ones(rack: &mut Rack) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let lease = rack.borrow("alpha/nvme1", "beta");
        let client = Client::connect(socket(&lease), PATIENCE).unwrap();
        client.write(7, 4, &6u16.to_le_bytes()).unwrap();
        let mut version = [0; 4];
        client.read(0, 8, &mut version).unwrap();
        assert_eq!(version, 0x0001_0400u32.to_le_bytes());
        rack.process(Some("alpha")).crash();
        let begun = Instant::now();
        while version != [0xff; 4] {
            client.read(0, 8, &mut version).unwrap();
        }
        times.push(begun.elapsed());
        // Configuration space is gone, too; writes go nowhere and nothing hangs.
        client.read(7, 0, &mut version).unwrap();
        assert_eq!(version, [0xff; 4]);
        client.write(0, 0x14, &[0; 4]).unwrap();
        let ended = rack.wait_lease(lease.lease, LeaseStage::Ended);
        assert!(ended.reason.unwrap().contains("its lender was lost"));
        assert!(rack.good(&["status"]).contains("its lender was lost"));
        // Also after the lease has ended its user is answered, not cut off.
        client.read(0, 8, &mut version).unwrap();
        assert_eq!(version, [0xff; 4]);
        rack.restart(Some("alpha"));
        rack.wait_device("alpha/nvme1", DeviceState::Offered);
    }
    times.sort();
    times
}
