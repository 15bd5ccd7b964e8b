//! The leader is cut off from etcd, and from nothing else: nodes, clients and the other control planes reach it all the
//! while, so that whatever it decides or says then would be heard.

use std::time::{Duration, Instant};

use rackbus_seeds::Random;

use super::processes::{Cluster, etcd};
use super::support::PATIENCE;
use super::support::relay::{Passage, Relay};
use super::{RACK, Record, check_while, logs};

/// How a leader is cut off: wholly, from the answers, from asking. Each twice.
const CUTS: [Passage; 6] = [
    Passage::Silent,
    Passage::SilentBack,
    Passage::SilentForth,
    Passage::SilentBack,
    Passage::SilentForth,
    Passage::Silent,
];

/// Whether a control plane believes that it leads.
async fn believes(cluster: &Cluster, control: usize) -> bool {
    let begun = Instant::now();
    loop {
        if let Some(status) = cluster.status(control).await {
            return status.leads;
        }
        assert!(begun.elapsed() < PATIENCE, "it says nothing: {}", cluster.controls[control].log());
    }
}

/// Cuts off one leader after the other; how long it took each time until another one led.
async fn cut_off(
    cluster: &mut Cluster,
    ways: &[Vec<Relay>],
    record: &Record,
    random: &mut Random,
) -> Vec<Duration> {
    let mut changes = Vec::new();
    for passage in CUTS {
        let leader = cluster.leader(None).await;
        println!("{:>9} {passage:?} at {}", record.now(), cluster.controls[leader].name);
        let begun = Instant::now();
        ways[leader].iter().for_each(|way| way.set(passage));
        cluster.leader(Some(leader)).await;
        changes.push(begun.elapsed());
        // It is asked when another one leads: it has to have ended before.
        assert!(!believes(cluster, leader).await, "two lead, {passage:?}: {}", logs(cluster));
        tokio::time::sleep(Duration::from_millis(random.below(1500) as u64)).await;
        // What was asked meanwhile arrives at etcd now, late.
        ways[leader].iter().for_each(|way| way.set(Passage::Open));
        tokio::time::sleep(Duration::from_millis(random.below(1500) as u64)).await;
    }
    changes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_leader_that_is_cut_off_from_etcd_ends_to_lead_before_another_one_begins() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::store(&program, 3, RACK, None);
    let members: Vec<String> =
        cluster.store.split(',').map(|url| url.trim_start_matches("http://").to_owned()).collect();
    // Each control plane has relays of its own to all members.
    let ways: Vec<Vec<Relay>> =
        (0..3).map(|_| members.iter().cloned().map(Relay::start).collect()).collect();
    for way in &ways {
        let urls: Vec<String> = way.iter().map(|it| format!("http://{}", it.address())).collect();
        cluster.control(&["--etcd", &urls.join(",")]);
    }
    let disturb = async |cluster: &mut Cluster, record: &Record, random: &mut Random| {
        cut_off(cluster, &ways, record, random).await
    };
    check_while(&mut cluster, 1, disturb).await;
}
