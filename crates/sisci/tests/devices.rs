//! Programs that borrow devices of a rack through the API: `examples/sisci/nvme.c` on a drive, against whole nodes, of one
//! machine and of several.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command};

use rackbus_attach::{Location, SegmentOptions, Session};
use rackbus_control::api::{Device, EventKind, LeaseStage, Placement};
use support::nodes::{Nodes, nvme_example};
use support::{Build, programs, text};

const RACK: &str = "name = \"test\"\n\
    [hosts.alpha]\n\
    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"16 MiB\"\nbacking = \"memory\"\n\
    [hosts.beta]\n\
    [hosts.gamma.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n";

async fn blocking<R: Send + 'static>(job: impl FnOnce() -> R + Send + 'static) -> R {
    tokio::task::spawn_blocking(job).await.unwrap()
}

/// Runs a program to its end, which is to be a good one; what it printed.
async fn succeed(mut command: Command) -> String {
    let output = blocking(move || command.output().unwrap()).await;
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output));
    text(&output)
}

/// A program on beta that has the drive and uses it until it is gone.
async fn using(
    nodes: &Nodes,
    program: &Path,
    isolation: &str,
) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = nodes.on("beta", program);
    command.args(["-drive", "alpha/nvme0", "-until-gone"]).env("RACKBUS_ISOLATION", isolation);
    blocking(move || {
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 && line != "in use\n" {
            line.clear();
        }
        assert_eq!(line, "in use\n");
        (child, lines)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_drives_a_borrowed_drive_by_its_registers_in_memory() {
    drives(Nodes::start(RACK).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_drives_a_drive_of_another_machine_by_its_registers_in_memory() {
    drives(Nodes::of_machines(RACK).await).await;
}

async fn drives(mut nodes: Nodes) {
    let program = blocking(nvme_example).await;
    // The drive's own host borrows as any other.
    for host in ["beta", "alpha"] {
        let mut run = nodes.on(host, program);
        run.args(["-drive", "alpha/nvme0"]);
        let said = succeed(run).await;
        assert!(said.contains("write, flush, read: 8192 bytes are the same"), "{said}");
        assert!(said.ends_with("nvme: ok\n"), "{said}");
        nodes.until_all_are_offered().await;
    }
    // By leases like any other.
    let leases = nodes.client.leases(true).await.unwrap();
    assert_eq!(leases.len(), 2);
    assert!(leases.iter().all(|lease| lease.returned && lease.stage == LeaseStage::Ended));
    assert!(leases.iter().all(|lease| lease.group.as_deref().unwrap().starts_with("program-")));
    let mut events = nodes.client.events(Some(EventKind::Lease), None, false).await.unwrap();
    let mut about = 0;
    while let Some(event) = events.next().await {
        about += u32::from(event.lease == Some(leases[0].lease));
    }
    assert!(about > 0, "no event tells of the lease");
}

/// The bytes go from one lender to the other's memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_borrowed_drive_reads_and_writes_another_devices_memory() {
    let mut nodes = Nodes::start(RACK).await;
    let program = blocking(nvme_example).await;
    let mut run = nodes.on("beta", program);
    run.args(["-drive", "alpha/nvme0", "-memory", "gamma/ram0"]);
    let said = succeed(run).await;
    for step in ["drive to memory function", "memory function to drive"] {
        assert!(said.contains(&format!("{step}: 8192 bytes are the same")), "{said}");
    }
    nodes.until_all_are_offered().await;
    // The drive itself moved them, by a window to the other device's BAR.
    let moved = |device: &Device| {
        let report = device.report.clone().unwrap_or_default();
        let bytes = (report.peer_bytes_read, report.peer_bytes_written);
        device.function != "alpha/nvme0" || bytes == (8192, 8192)
    };
    nodes.until(moved).await;
    // With strict isolation the drive's controller is not at its lender, and is told so.
    let mut run = nodes.on("beta", program);
    run.args(["-drive", "alpha/nvme0", "-memory", "gamma/ram0"]).env("RACKBUS_ISOLATION", "strict");
    let output = blocking(move || run.output().unwrap()).await;
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("write, flush, read: 8192 bytes are the same"), "{said}");
    assert!(said.contains("strict isolation") && said.contains("Not supported"), "{said}");
    nodes.until_all_are_offered().await;
    let leases = nodes.client.leases(true).await.unwrap();
    let placed = leases.iter().filter(|lease| lease.placement == Placement::Borrower).count();
    assert_eq!((leases.len(), placed), (4, 2));
}

/// The drive's controller is on the borrower's machine, whose bus leads to no device of another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_drive_of_another_machine_reaches_no_other_devices_memory() {
    let mut nodes = Nodes::of_machines(RACK).await;
    let program = blocking(nvme_example).await;
    let mut run = nodes.on("beta", program);
    run.args(["-drive", "alpha/nvme0", "-memory", "gamma/ram0"]);
    let output = blocking(move || run.output().unwrap()).await;
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("write, flush, read: 8192 bytes are the same"), "{said}");
    assert!(said.contains("Not supported"), "{said}");
    nodes.until_all_are_offered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_borrowed_drive_writes_what_another_host_offers() {
    writes_what_another_host_offers(Nodes::start(RACK).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drive_of_another_machine_writes_what_another_machine_offers() {
    writes_what_another_host_offers(Nodes::of_machines(RACK).await).await;
}

/// A segment of alpha's and of gamma's, which a program on beta is connected to, feeds the drive.
async fn writes_what_another_host_offers(mut nodes: Nodes) {
    let program = blocking(nvme_example).await;
    for (host, number) in [("gamma", 12), ("alpha", 4)] {
        let location = Location { run_dir: nodes.run_dir().to_owned(), host: host.to_owned() };
        let (offered, session) = blocking(move || {
            let session = Session::open(&location).unwrap();
            let segment = session.create_segment(&SegmentOptions::shared(4711, 4096)).unwrap();
            let bytes: Vec<u8> = (0..4096).map(|at: u32| (at * 11 + number) as u8).collect();
            segment.map(0, 4096).unwrap().whole().copy_from(&bytes);
            segment.set_available().unwrap();
            (segment, session)
        })
        .await;
        let mut run = nodes.on("beta", program);
        run.args(["-drive", "alpha/nvme0", "-segment", &number.to_string(), "4711"]);
        let said = succeed(run).await;
        let wanted = "segment of another host to drive: 4096 bytes are the same";
        assert!(said.contains(wanted), "{said}");
        nodes.until_all_are_offered().await;
        drop((offered, session));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_learns_that_its_drive_was_taken_away() {
    learns_that_its_drive_was_taken_away(Nodes::start(RACK).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_learns_that_its_drive_of_another_machine_was_taken_away() {
    learns_that_its_drive_was_taken_away(Nodes::of_machines(RACK).await).await;
}

async fn learns_that_its_drive_was_taken_away(mut nodes: Nodes) {
    let program = blocking(nvme_example).await;
    for isolation in ["shared", "strict"] {
        let (mut child, lines) = using(&nodes, program, isolation).await;
        let leases = nodes.client.leases(false).await.unwrap();
        assert_eq!(leases.len(), 1);
        nodes.client.give_back(leases[0].lease).await.unwrap();
        let (status, said) = blocking(move || {
            let said: Vec<String> = lines.lines().map(Result::unwrap).collect();
            (child.wait().unwrap(), said)
        })
        .await;
        assert!(status.success(), "{said:?}");
        assert_eq!(said, ["gone: Not connected"]);
        nodes.until_all_are_offered().await;
    }
}

/// Flags, errors, refused inputs: `tests/c/devices.c`.
#[tokio::test(flavor = "multi_thread")]
async fn calls_about_devices_are_refused_as_the_header_says() {
    for mut nodes in [Nodes::start(RACK).await, Nodes::of_machines(RACK).await] {
        let built = blocking(|| programs(Build::Plain).join("tests")).await;
        for program in ["devices", "devices++"] {
            succeed(nodes.on("beta", &built.join(program))).await;
            nodes.until_all_are_offered().await;
        }
    }
}
