//! What a driver did with a borrowed drive can be read by users: by `devices`, `top` and metrics,
//! wherever the drive's front runs; and so can what hosts share.

mod support;

use std::time::Instant;

use rackbus_attach::{Location, SegmentOptions, Session};
use rackbus_control::api::Lease;
use support::{PATIENCE, Rack, THREE_HOSTS, open};

#[test]
fn what_a_driver_did_is_counted_with_its_times_and_failures() {
    let rack = Rack::up(THREE_HOSTS);
    for (function, isolation, at) in
        [("alpha/nvme0", "shared", "report"), ("alpha/nvme1", "strict", "front")]
    {
        let borrow = ["borrow", function, "--for", "beta", "--isolation", isolation];
        let lease: Lease = serde_json::from_value(rack.json(&borrow)).unwrap();
        let mut drive = open(&lease);
        let mut block = vec![0; 4096];
        for lba in 0..100 {
            drive.write(lba * 8, &[7; 4096], false).unwrap();
            drive.read(lba * 8, &mut block).unwrap();
        }
        drive.flush().unwrap();
        drive.read(u64::MAX / 2, &mut block).unwrap_err();
        let counted = rack.wait(async |client| {
            let devices = client.devices().await.ok()?;
            let device = devices.into_iter().find(|device| device.function == function)?;
            let report = if at == "front" { device.front } else { device.report };
            // The last thing that was done.
            report.filter(|report| report.operations.get("read").is_some_and(|r| r.failed == 1))
        });
        let read = &counted.operations["read"];
        assert_eq!((read.done, read.failed, read.bytes), (101, 1, 100 * 4096), "{counted:?}");
        assert_eq!(read.latency.iter().sum::<u64>(), 101);
        assert!(read.total_ns > 0 && read.percentile_ns(0.5).is_some());
        let write = &counted.operations["write"];
        assert_eq!((write.done, write.failed, write.bytes), (100, 0, 100 * 4096));
        assert!(counted.operations["admin"].done > 0 && counted.wakeups > 0, "{counted:?}");

        let told = rack.good(&["devices", function]);
        let row = told.lines().find(|line| line.starts_with("read ")).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[1..4], ["101", "1", "409600"], "{told}");

        let (host, role) = if at == "front" { ("beta", "borrower") } else { ("alpha", "lender") };
        let page = rack.good(&["metrics", host]);
        let labels =
            format!("function=\"{function}\",host=\"{host}\",role=\"{role}\",operation=\"read\"");
        for line in [
            format!("rackbus_function_operation_seconds_count{{{labels}}} 101"),
            format!("rackbus_function_operations_failed_total{{{labels}}} 1"),
            format!("rackbus_function_bytes_total{{{labels}}} 409600"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
    }
}

#[test]
fn top_shows_what_is_done_now() {
    let rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    let mut shown = || {
        let top = rack.command(&["top", "--json"]).stdout(std::process::Stdio::piped()).spawn();
        let mut top = top.unwrap();
        let mut block = vec![0; 4096];
        while top.try_wait().unwrap().is_none() {
            drive.read(8, &mut block).unwrap();
        }
        let output = top.wait_with_output().unwrap();
        assert!(output.status.success());
        let picture: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        picture["functions"][0].clone()
    };
    let (begun, mut row) = (Instant::now(), shown());
    // A busy machine may do few reads just then.
    while row["reads"].as_f64().is_none_or(|reads| reads <= 10.0) && begun.elapsed() < PATIENCE {
        row = shown();
    }
    assert_eq!((&row["function"], &row["holder"]), (&"alpha/nvme0".into(), &"beta".into()));
    assert!(row["reads"].as_f64().unwrap() > 10.0, "{row}");
    assert!(row["p99_us"].as_f64().unwrap() > 0.0, "{row}");
    // A read that ends just when the drive is looked at may be in the one number and not in the other: one at either end of
    // the time that is shown, which is a second or more as a rule.
    let [reads, bytes] = ["reads", "read_bytes"].map(|name| row[name].as_f64().unwrap());
    assert!((bytes / 4096.0 - reads).abs() < 10.0 + reads * 1e-6, "{row}");

    let table = rack.good(&["top", "--once"]);
    assert!(table.contains("FUNCTION") && table.contains("conversations".to_uppercase().as_str()));
    assert_eq!(rack.run(&["top", "--interval", "0"]).status.code(), Some(2));
}

#[test]
fn top_shows_what_hosts_share() {
    let rack = Rack::up(THREE_HOSTS);
    let location = Location { run_dir: rack.run_dir(), host: "alpha".to_owned() };
    let session = Session::open(&location).unwrap();
    let segment = session.create_segment(&SegmentOptions::shared(7, 3 << 20)).unwrap();
    segment.set_available().unwrap();
    // It shows two reports of each node, of which the last is from after this.
    let picture = rack.json(&["top"]);
    let shared = picture["shared"].as_array().unwrap();
    let row = shared.iter().find(|row| row["host"] == "alpha").unwrap();
    assert_eq!(
        (&row["counts"]["segments"], &row["bytes"]["segments"]),
        (&1.into(), &3_145_728.into())
    );
    assert!(row["seconds"].as_f64().unwrap() > 0.0, "{row}");
    assert_eq!(shared.len(), 3, "{picture}");

    let table = rack.good(&["top", "--once"]);
    let line = table.lines().skip_while(|line| !line.contains("OF EXPORT")).nth(1).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[..5], ["alpha", "1", "1,", "3", "MiB"], "{table}");
    let page = rack.good(&["metrics", "alpha"]);
    let bytes = "rackbus_shared_memory_bytes{what=\"segments\"} 3145728.0";
    assert!(page.lines().any(|line| line == bytes), "{page}");
}
