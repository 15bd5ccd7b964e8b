//! The rack's network over whole racks: stock programs in the namespaces of two and three hosts, hosts that are
//! killed and that stall, captures. Making interfaces takes root: without it the tests say so and end.

mod support;

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use support::lab::{Lab, Server, eventually, may_make_interfaces, ping};
use support::pcapng::{CaptureFile, CapturedFrame};
use support::programs::has;
use support::{PATIENCE, Rack};

#[test]
fn packets_of_all_sizes_come_back_and_long_ones_only_in_pieces() {
    let Some(lab) = Lab::up("ping", "") else { return };
    if !has("ping") {
        return;
    }
    for size in ["0", "56", "1472", "1473", "9000", "65000"] {
        ping(&lab, "alpha", "10.77.0.2", &["-s", size]);
        ping(&lab, "beta", "fd72:6163:6b62::3", &["-s", size]);
    }
    ping(&lab, "gamma", "10.77.0.1", &["-M", "do", "-s", "1472"]);
    let refused = lab.try_on("alpha", &["ping", "-c", "1", "-M", "do", "-s", "1473", "10.77.0.2"]);
    assert!(!refused.status.success(), "{refused:?}");
    // Nobody was asked for an address.
    let neighbours = lab.on("alpha", &["ip", "neigh"]);
    assert_eq!(neighbours.matches("PERMANENT").count(), 4, "{neighbours}");
    let status = lab.rack.json(&["net", "status"]);
    assert_eq!(status[0]["up"], true);
    let reached = lab.rack.json(&["reach", "alpha"]);
    let lent: Vec<&Value> = reached.as_array().unwrap().iter().map(|it| &it["host"]).collect();
    assert!(lent.contains(&&"beta".into()), "{reached}");
    let metrics = lab.rack.good(&["metrics", "alpha"]);
    assert!(
        metrics.contains("network_sent_frames_total{port=\"alpha\",peer=\"beta\"}"),
        "{metrics}"
    );
}

#[test]
fn an_mtu_of_64_kib_is_one_frame() {
    let Some(lab) = Lab::up("mtu", "mtu = 65521\nsubnet = \"10.99.0.0/24\"") else { return };
    if !has("ping") {
        return;
    }
    ping(&lab, "alpha", "10.99.0.2", &["-M", "do", "-s", "65493"]);
}

#[test]
fn streams_over_both_protocols_and_several_queues_arrive_whole() {
    let Some(lab) = Lab::up("iperf", "queues = 2") else { return };
    if !has("iperf3") {
        return;
    }
    let _server = lab.serve("beta", &["iperf3", "-s", "--forceflush"]);
    for (to, more) in [
        ("10.77.0.2", &["-P", "1"][..]),
        ("10.77.0.2", &["-P", "16"]),
        ("fd72:6163:6b62::2", &["-P", "2", "-R"]),
    ] {
        let args = [&["-n", "40M", "-c", to], more].concat();
        let answer = lab.iperf3("alpha", &args);
        let end = &answer["end"];
        // What was still under way when the receiver was asked is not in its figure.
        let bytes = |side: &str| end[side]["bytes"].as_u64().unwrap();
        assert!(bytes("sum_sent") >= 40_000_000 && bytes("sum_received") > 0, "{end}");
    }
    // Datagrams of a flow stay in order, over however many queues its fellows go.
    for to in ["10.77.0.2", "fd72:6163:6b62::2"] {
        let answer = lab.iperf3("alpha", &["-u", "-P", "4", "-b", "20M", "-n", "1M", "-c", to]);
        for stream in answer["end"]["streams"].as_array().unwrap() {
            assert_eq!(stream["udp"]["out_of_order"], 0, "{to}: {stream}");
        }
    }
    // Large segments crossed the fabric in one piece: the more a sender has at a time, the larger they are, which is little
    // on a busy machine.
    let sent = || {
        let peer = lab.peer("alpha", "beta");
        (peer["sent"].as_u64().unwrap(), peer["sent_bytes"].as_u64().unwrap())
    };
    let mut before = (0, 0);
    eventually("segments do not cross in one piece", &lab.rack, || {
        let (frames, bytes) = sent();
        let is_large = bytes - before.1 > 3000 * (frames - before.0);
        if !is_large {
            before = (frames, bytes);
            lab.iperf3("alpha", &["-n", "40M", "-c", "10.77.0.2"]);
        }
        is_large
    });
}

#[test]
fn a_file_is_the_same_at_the_other_end() {
    let Some(lab) = Lab::up("file", "") else { return };
    if !has("socat") || !has("sha256sum") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    let data: Vec<u8> =
        (0..64u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::File::create(&file).unwrap().write_all(&data).unwrap();
    let path = file.display().to_string();
    let receive = "socat -u TCP-LISTEN:7001,reuseaddr - | sha256sum";
    let receiver =
        lab.command("beta", &["sh", "-c", receive]).stdout(Stdio::piped()).spawn().unwrap();
    let send = format!("socat -u FILE:{path} TCP:10.77.0.2:7001,retry=200,interval=0.05");
    lab.on("gamma", &["sh", "-c", &send]);
    let arrived = receiver.wait_with_output().unwrap().stdout;
    let sent = Command::new("sha256sum").arg(&path).output().unwrap().stdout;
    assert_eq!(arrived[..64], sent[..64]);
}

/// Many connections at once, kept and made anew for each request, over both protocols.
#[test]
fn a_web_server_answers_the_clients_of_other_hosts() {
    let Some(lab) = Lab::up("web", "queues = 2") else { return };
    if !has("nginx") || !has("wrk") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().display().to_string();
    let settings = folder.path().join("nginx.conf");
    let text = format!(
        "daemon off; master_process off; user root; error_log stderr; pid {own}/pid;
        events {{ worker_connections 1024; }}
        http {{ access_log off; client_body_temp_path {own}; proxy_temp_path {own}; fastcgi_temp_path {own};
        uwsgi_temp_path {own}; scgi_temp_path {own};
        server {{ listen 80; listen [::]:80; root {own}; keepalive_requests 1000; }} }}"
    );
    std::fs::write(&settings, text).unwrap();
    std::fs::write(folder.path().join("page"), vec![b'x'; 30_000]).unwrap();
    let settings = settings.display().to_string();
    let mut server = lab.command("beta", &["nginx", "-p", &own, "-c", &settings]);
    let _server = Server(server.stderr(Stdio::inherit()).spawn().unwrap());
    eventually("the server answers", &lab.rack, || {
        let one = ["wrk", "-t", "1", "-c", "1", "-d", "1", "http://10.77.0.2/page"];
        wrk_requests(&lab.try_on("alpha", &one)).is_some_and(|requests| requests > 0)
    });
    for (from, url) in [
        ("alpha", "http://10.77.0.2/page"),
        ("gamma", "http://[fd72:6163:6b62::2]/page"),
        ("beta", "http://10.77.0.2/page"),
    ] {
        for more in [&[][..], &["-H", "Connection: close"]] {
            let program =
                [&["wrk", "-t", "2", "-c", "64", "-d", "2", "--timeout", "60s"], more, &[url]]
                    .concat();
            let output = lab.try_on(from, &program);
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let requests = wrk_requests(&output).unwrap_or(0);
            assert!(output.status.success() && requests > 0, "{from} {more:?}: {output:?}");
            // It tells of errors only where there were any.
            assert!(
                !said.contains("errors") && !said.contains("Non-2xx"),
                "{from} {more:?}: {said}"
            );
        }
    }
}

/// How many requests `wrk` says that were answered.
fn wrk_requests(output: &Output) -> Option<u64> {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = said.lines().find(|line| line.contains(" requests in "))?;
    line.trim().split(' ').next()?.parse().ok()
}

#[test]
fn a_host_that_is_killed_or_stalls_stops_nobody_and_comes_back_by_itself() {
    let Some(mut lab) = Lab::up("death", "") else { return };
    if !has("ping") {
        return;
    }
    ping(&lab, "alpha", "10.77.0.2", &[]);
    let beta = lab.rack.process(Some("beta"));
    beta.signal(Signal::STOP);
    // Frames for it fill its ring and are dropped; others are not waited for.
    lab.on("alpha", &["sh", "-c", "ping -q -f -c 2000 -W 1 -s 1400 10.77.0.2 > /dev/null; true"]);
    ping(&lab, "alpha", "10.77.0.3", &[]);
    // A node tells of its counts now and then.
    eventually("nothing was dropped", &lab.rack, || {
        lab.peer("alpha", "beta")["drops"]["full"].as_u64() > Some(0)
    });
    beta.signal(Signal::CONT);
    let answers = |lab: &Lab, to: &str| {
        lab.try_on("alpha", &["ping", "-c", "1", "-W", "1", to]).status.success()
    };
    eventually("it is not back after it stalled", &lab.rack, || answers(&lab, "10.77.0.2"));
    beta.crash();
    ping(&lab, "alpha", "10.77.0.3", &[]);
    eventually("its ring stays", &lab.rack, || lab.peer("alpha", "beta")["rings"] == 0);
    lab.rack.restart(Some("beta"));
    eventually("it is not back after it was killed", &lab.rack, || answers(&lab, "10.77.0.2"));
    assert!(lab.peer("alpha", "beta")["opened"].as_u64() >= Some(2));
}

#[test]
fn interfaces_go_and_come_and_captures_show_what_crossed() {
    let Some(lab) = Lab::up("capture", "") else { return };
    if !has("ping") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("alpha.pcapng");
    let path = file.display().to_string();
    let capture = ["net", "capture", "alpha", "-w", &path, "--frames", "40", "--json"];
    let mut command = lab.rack.command(&capture);
    let capturing = command.stdout(Stdio::piped()).spawn().unwrap();
    eventually("it has no head", &lab.rack, || {
        std::fs::metadata(&file).is_ok_and(|it| it.len() > 0)
    });
    let second = lab.rack.bad(1, &["net", "capture", "alpha", "-w", "/dev/null"]);
    assert!(second.contains("captured already"), "{second}");
    lab.on("alpha", &["ping", "-c", "50", "-i", "0.02", "-q", "10.77.0.2"]);
    let told = capturing.wait_with_output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&told["frames"], &told["missed"]), (&40.into(), &0.into()));
    let captured = CaptureFile::read(&std::fs::read(&file).unwrap());
    assert_eq!((&*captured.interface, captured.frames.len()), ("alpha", 40));
    let between = [2, 0x72, 0x62, 0, 0, 2, 2, 0x72, 0x62, 0, 0, 1];
    let asks = |it: &&CapturedFrame| it.sent && it.bytes.starts_with(&between);
    let answers = |it: &&CapturedFrame| {
        !it.sent && it.bytes[..6] == between[6..] && it.bytes[6..12] == between[..6]
    };
    let all = captured.frames.iter();
    assert!(all.clone().filter(asks).count() > 5 && all.filter(answers).count() > 5);
    lab.rack.good(&["net", "down", "alpha"]);
    let status = lab.rack.json(&["net", "status", "alpha"]);
    assert_eq!(
        (&status[0]["up"], status[0]["ports"].as_array().unwrap().len()),
        (&false.into(), 0)
    );
    lab.rack.bad(1, &["net", "capture", "alpha", "-w", "/dev/null"]);
    lab.rack.good(&["net", "up", "alpha"]);
    eventually("it is not up again", &lab.rack, || {
        lab.try_on("alpha", &["ping", "-c", "1", "-W", "1", "10.77.0.2"]).status.success()
    });
    lab.rack.restart_in_place("alpha");
    eventually("it is not back after a restart in place", &lab.rack, || {
        lab.try_on("beta", &["ping", "-c", "1", "-W", "1", "10.77.0.1"]).status.success()
    });
}

/// Each line of the book's tutorial does what it says.
#[test]
fn the_tutorial_of_the_book_works() {
    let book = include_str!("../../../docs/book/src/network.md");
    let block = |fence: &str| {
        let rest = book.split(&format!("```{fence}\n")).nth(1).expect("the tutorial has one");
        rest.split("```").next().unwrap_or_default()
    };
    let lines: Vec<&str> =
        block("console").lines().filter_map(|line| line.strip_prefix("$ rackbus ")).collect();
    assert!(lines.len() > 8, "{lines:?}");
    if !may_make_interfaces() || !has("ping") || !has("iperf3") {
        return;
    }
    let name = format!("t{}book", std::process::id());
    let rack =
        Rack::described(&block("toml").replace("name = \"net\"", &format!("name = \"{name}\"")));
    let folder = tempfile::tempdir().unwrap();
    for line in lines {
        let line = line.replace("rack.toml", &rack.file());
        let words: Vec<&str> = line.split_whitespace().collect();
        let run = || rack.command(&words).current_dir(folder.path()).output().unwrap();
        let mut output = run();
        // A server that goes to the background may not listen yet.
        let deadline = Instant::now() + PATIENCE;
        while words.contains(&"-c") && !output.status.success() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
            output = run();
        }
        assert!(output.status.success(), "rackbus {line}: {output:?}{}", rack.logs());
        let told = String::from_utf8(output.stdout).unwrap();
        if line == "net up" {
            let table = block("console").split("$ rackbus net up\n").nth(1).unwrap();
            let table: Vec<&str> =
                table.lines().take_while(|line| !line.starts_with('$')).collect();
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            for (shown, told) in table.iter().zip(told.lines()) {
                assert_eq!(words(shown)[..5], words(told)[..5]);
            }
        }
    }
    assert!(std::fs::metadata(folder.path().join("alpha.pcapng")).unwrap().len() > 0);
}

#[test]
fn without_rights_there_is_one_error_that_says_what_to_do() {
    let rack = Rack::up("name = \"norights\"\n[hosts.alpha]\n");
    let output = match rustix::process::geteuid().is_root() {
        false => rack.run(&["net", "up"]),
        // A node without capabilities is what one of another user is.
        true => {
            if !has("setpriv") {
                return;
            }
            drop(rack);
            let rack = Rack::described("name = \"norights\"\n[hosts.alpha]\n");
            let up = rack.command(&["up", &rack.file()]);
            let mut dropped = Command::new("setpriv");
            dropped.args(["--bounding-set=-sys_admin,-net_admin", "--inh-caps=-all", "--"]);
            dropped.arg(up.get_program()).args(up.get_args());
            for (name, value) in up.get_envs() {
                dropped.envs(value.map(|value| (name, value)));
            }
            assert!(dropped.output().unwrap().status.success());
            let output = rack.run(&["net", "up"]);
            rack.run(&["down"]);
            output
        }
    };
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("CAP_NET_ADMIN") && errors.lines().count() == 1, "{errors}");
}
