//! Memory functions of a rack of real processes: listed, lent, and taken away from programs that keep
//! their mappings while nodes are killed.

mod support;

use std::time::Duration;

use rackbus_control::api::{DeviceState, Lease};
use rackbus_memory::Region as Mapping;
use rackbus_pci::vfio_user::Client as User;
use rackbus_spec::vfio_user::region;
use support::{PATIENCE, Rack, socket};

const SIZE: u64 = 4 << 20;
/// The BAR that is the memory.
const BAR: u32 = 2;

/// Memory that is zeroed, and some in a file of `folder`, which is kept; and how long a lease lives.
fn rack(folder: &str, ttl: &str) -> String {
    format!(
        "name = \"lab\"\n[control]\nlease_ttl = \"{ttl}\"\nreturn_grace = \"500 ms\"\n\
         [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
         [hosts.alpha.devices.ram1]\nkind = \"memory\"\nsize = \"4 MiB\"\nat_return = \"keep\"\n\
         backing = \"{folder}/ram.img\"\n[hosts.beta]\n[hosts.gamma]\n"
    )
}

fn open(lease: &Lease) -> (User, Mapping) {
    let user = User::connect(socket(lease), PATIENCE).unwrap();
    user.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
    let memory = user.map_region(BAR, 0, SIZE).unwrap();
    (user, memory)
}

fn store(memory: &Mapping, data: &[u8; 8]) {
    memory.slice(4096, 8).unwrap().copy_from(data);
}

fn load(memory: &Mapping) -> [u8; 8] {
    let mut data = [0; 8];
    memory.slice(4096, 8).unwrap().copy_to(&mut data);
    data
}

#[test]
fn memory_is_taken_away_with_its_lease_whoever_is_killed() {
    // Only files in memory are mapped by programs of ours.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut rack = Rack::up(&rack(&folder.path().display().to_string(), "4 s"));
    let listed = rack.good(&["devices"]);
    assert!(listed.contains("4 MiB, memory, zeroed at return"), "{listed}");
    assert!(listed.contains("ram.img, kept at return"), "{listed}");

    // Its borrower's node is killed: the program does not notice, and the lease expires.
    let lease = rack.borrow("alpha/ram0", "beta");
    let (_user, old) = open(&lease);
    store(&old, b"of beta!");
    rack.process(Some("beta")).crash();
    rack.wait_device("alpha/ram0", DeviceState::Offered);
    let lease = rack.borrow("alpha/ram0", "gamma");
    let (_user, new) = open(&lease);
    store(&old, b"too late");
    assert_eq!((load(&new), load(&old)), ([0; 8], *b"too late"), "each has memory of its own");
    rack.restart(Some("beta"));
    rack.wait_up(&["alpha", "beta", "gamma"]);

    // Its lender's node is killed: the next one has the file's content, and the program does not
    // reach it any more.
    let lease = rack.borrow("alpha/ram1", "beta");
    let (_user, old) = open(&lease);
    store(&old, b"of beta!");
    rack.process(Some("alpha")).crash();
    rack.restart(Some("alpha"));
    rack.wait_device("alpha/ram1", DeviceState::Offered);
    let lease = rack.borrow("alpha/ram1", "gamma");
    let (_user, new) = open(&lease);
    store(&old, b"too late");
    assert_eq!(load(&new), *b"of beta!");
}

#[test]
fn a_waiting_borrower_gets_a_returned_function_and_leaves_the_queue_when_its_command_ends() {
    let rack = Rack::up(&rack("/dev/shm", "15 s"));
    let held = rack.borrow("alpha/ram0", "beta");
    let refused = rack.bad(1, &["borrow", "alpha/ram0", "--for", "gamma", "--wait=10ms"]);
    assert!(refused.contains("is lent to beta") && refused.contains("--wait"), "{refused}");
    let wait = |priority: &str| {
        let args =
            ["borrow", "alpha/ram0", "--for", "gamma", "--json", "--wait=1min", "--priority"];
        let mut command = rack.command(&[&args[..], &[priority]].concat());
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let waiting = |count: usize| {
        // Nothing is told of who waits.
        let deadline = std::time::Instant::now() + PATIENCE;
        while rack.json(&["devices", "alpha/ram0"])["waiting"] != count {
            assert!(std::time::Instant::now() < deadline, "{count} do not wait");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let mut ended = wait("9");
    let waits = wait("1");
    waiting(2);
    ended.kill().unwrap();
    ended.wait().unwrap();
    waiting(1);
    rack.give_back(&held);
    let output = waits.wait_with_output().unwrap();
    let lease: Lease = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((lease.borrower.as_str(), output.status.success()), ("gamma", true));
    rack.give_back(&lease);
}
