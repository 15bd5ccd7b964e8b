//! Functions of other programs, lent again: those of another rack's nodes.

mod support;

use rackbus_control::api::DeviceState;
use support::{Rack, THREE_HOSTS, open, pattern, socket, try_open};

/// The rack file of one that lends what is at `socket`.
fn lends(socket: &std::path::Path) -> String {
    format!(
        "name = \"next\"\n[control]\nlease_ttl = \"15 s\"\nreturn_grace = \"500 ms\"\n\
         [hosts.delta.devices.far0]\nkind = \"upstream\"\nsocket = {socket:?}\n[hosts.epsilon]\n"
    )
}

/// What one rack has borrowed, another one lends: two nodes of each are between driver and drive.
#[test]
fn a_function_that_a_rack_borrowed_is_lent_by_another_rack() {
    let first = Rack::up(THREE_HOSTS);
    let lease = first.borrow("alpha/nvme1", "beta");
    let second = Rack::up(&lends(socket(&lease)));
    let own = second.borrow("delta/far0", "epsilon");
    let mut drive = open(&own);
    let info = drive.info().clone();
    assert_eq!(info.blocks * u64::from(info.block_size), 16 << 20);
    let data = pattern(3, 1 << 20);
    drive.write(64, &data, true).unwrap();
    let mut read = vec![0; data.len()];
    drive.read(64, &mut read).unwrap();
    assert!(read == data);
    // Whose nodes go on in other processes, the one and the other.
    for (rack, host) in
        [(&first, "beta"), (&first, "alpha"), (&second, "delta"), (&second, "epsilon")]
    {
        rack.restart_in_place(host);
        drive.write(0, &data[..8192], true).unwrap();
        drive.read(64, &mut read).unwrap();
        assert!(read == data, "{host}");
    }
    // One user at a time, and the next has the same drive.
    drop(drive);
    second.give_back(&own);
    let own = second.borrow("delta/far0", "delta");
    let mut drive = open(&own);
    drive.read(64, &mut read).unwrap();
    assert!(read == data);
    drop(drive);
    second.give_back(&own);
    let mut drive = open(&lease);
    drive.read(64, &mut read).unwrap();
    assert!(read == data);
    drop(drive);
    // The first rack takes it back: its user has it no more, and nobody else gets it.
    let own = second.borrow("delta/far0", "epsilon");
    let mut drive = open(&own);
    first.give_back(&lease);
    assert!(drive.read(64, &mut read).is_err());
    drop(drive);
    second.give_back(&own);
    first.wait_device("alpha/nvme1", DeviceState::Offered);
    let next = second.borrow("delta/far0", "epsilon");
    assert!(try_open(&next).is_err());
    let told = second.wait(async |client| {
        let devices = client.devices().await.ok()?;
        devices.into_iter().find_map(|it| it.report?.last_attach_refused)
    });
    assert!(told.contains("no vfio-user server answers at"), "{told}");
}
