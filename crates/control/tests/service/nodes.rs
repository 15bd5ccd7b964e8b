//! What the control plane takes from nodes, and what it does with those that are not there or do not listen.

use super::*;

/// A node that was spoken to in a later term than the control plane knows of: its records are an older copy.
#[tokio::test]
async fn a_control_plane_goes_on_in_a_later_term_than_all_that_nodes_know() {
    let control = Control::start().await;
    let first = control.client.listen("alpha", 0).await.unwrap().next().await.unwrap();
    let later = control.client.listen("alpha", 40).await.unwrap().next().await.unwrap();
    assert_eq!((first.term, later.term), (1, 41));
    let same = control.client.listen("beta", 41).await.unwrap().next().await.unwrap();
    assert_eq!(same.term, 41);
    // One node cannot use up the numbers, however often it says so.
    let said = control.client.listen("beta", u64::MAX).await;
    let Err(ControlClientError::Refused(refused)) = said else { panic!("it is heard: {said:?}") };
    assert_eq!(refused.code, "implausible_term");
    let status = control.client.control().await.unwrap();
    assert_eq!((status.term, status.leads, status.store.as_str()), (Some(41), true, "sqlite"));
}

/// The test runs itself as another process of the same user.
#[tokio::test]
async fn only_its_node_acts_for_a_host() {
    const STRANGER: &str = "RACKBUS_CONTROL_STRANGER";
    if let Some(socket) = std::env::var_os(STRANGER) {
        let client = ControlClient::new(Path::new(&socket));
        let said = NodeMessages { messages: vec![register("alpha", false)], report: None };
        let spoken = client.say("alpha", &said).await;
        let heard = client.listen("alpha", 0).await.map(drop);
        for refused in [spoken, heard] {
            let Err(ControlClientError::Refused(refused)) = refused else {
                panic!("a stranger is heard: {refused:?}")
            };
            assert_eq!(refused.code, "not_the_node");
        }
        client.status().await.expect("it may ask like everybody");
        return;
    }
    let control = Control::start().await;
    let mut stranger = tokio::process::Command::new(std::env::current_exe().unwrap());
    stranger.args(["--exact", "only_its_node_acts_for_a_host"]);
    stranger.env(STRANGER, control.path("control.sock"));
    assert!(stranger.status().await.unwrap().success());
}

#[tokio::test]
async fn what_a_node_says_of_itself_is_shown_while_it_is_there() {
    let control = Control::start().await;
    let engine = DeviceReport { trouble: Some("it hangs".into()), parks: 3, ..Default::default() };
    let devices = ["nvme0", "nvme1"].map(|name| (name.to_owned(), engine.clone()));
    let report =
        Some(NodeReport { devices: devices.into(), log_lines_left_out: 5, ..Default::default() });
    let said = NodeMessages { messages: Vec::new(), report };
    control.client.say("alpha", &said).await.unwrap();
    let shown = async || control.client.devices().await.unwrap().remove(0).report;
    assert_eq!(shown().await, None, "its node is not there");
    let listening = control.client.listen("alpha", 0).await.unwrap();
    assert_eq!(shown().await, Some(Box::new(engine)));
    let status = control.client.status().await.unwrap();
    let left_out: Vec<u64> = status.hosts.iter().map(|host| host.log_lines_left_out).collect();
    assert_eq!((left_out, status.log_lines_left_out), (vec![5, 0], 7));
    drop(listening);
}

/// Until its new life has registered, what is known of it is of the life before.
#[tokio::test]
async fn a_node_is_up_when_it_has_registered_since_it_listens() {
    let control = Control::start().await;
    let shown = async || {
        let (status, devices) = (control.client.status().await, control.client.devices().await);
        (status.unwrap().hosts.remove(0).state, devices.unwrap().remove(0).state)
    };
    let first = control.client.listen("alpha", 0).await.unwrap();
    assert_eq!(shown().await, (HostState::Down, DeviceState::Unreachable));
    control.say("alpha", vec![register("alpha", true)]).await.unwrap();
    assert_eq!(shown().await, (HostState::Up, DeviceState::Offered));
    drop(first);
    let _second = control.client.listen("alpha", 0).await.unwrap();
    assert_eq!(shown().await, (HostState::Down, DeviceState::Unreachable));
    // A life that is over does not count.
    let stale = Message::Register {
        incarnation: 0,
        devices: Default::default(),
        newest_lease: 0,
        address: "alpha".to_owned(),
    };
    control.say("alpha", vec![stale]).await.unwrap();
    assert_eq!(shown().await, (HostState::Down, DeviceState::Unreachable));
    let mut changes = control.client.changes().await.unwrap();
    control.say("alpha", vec![register("alpha", true)]).await.unwrap();
    assert_eq!(shown().await, (HostState::Up, DeviceState::Offered));
    // Who follows what changes is told the same.
    let told = async {
        loop {
            if let Change::Device(device) = changes.next().await.unwrap()
                && device.function == "alpha/nvme0"
            {
                return device.state;
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, told).await.unwrap(), DeviceState::Offered);
}

/// An older node takes the lease and ignores the VM: it would be said that the function is plugged in.
#[tokio::test]
async fn a_function_for_a_vm_is_refused_where_the_node_does_not_plug_it_in() {
    let control = Control::start().await;
    let _listening = control.client.listen("beta", 0).await.unwrap();
    let vm = Some("db".to_owned());
    let refused = async |plugs_into_vms, function| {
        let report = Some(NodeReport { plugs_into_vms, ..Default::default() });
        let said = NodeMessages { messages: Vec::new(), report };
        control.client.say("beta", &said).await.unwrap();
        let request = BorrowRequest { vm: vm.clone(), ..BorrowRequest::new(function, "beta") };
        let error = control.client.borrow_as(&request).await.unwrap_err();
        let ControlClientError::Refused(error) = error else { panic!("{error}") };
        error
    };
    let error = refused(false, "alpha/nvme0").await;
    assert_eq!(error.code, "version");
    assert!(error.error.contains("does not plug functions into VM db"), "{error:?}");
    assert!(control.client.leases(true).await.unwrap().is_empty());
    assert_eq!(refused(true, "alpha/nvme9").await.code, "unknown_function");
}

#[tokio::test]
async fn a_node_that_takes_nothing_is_cut_off_and_not_queued_for_without_limit() {
    let control = Control::start().await;
    let mut node = UnixStream::connect(control.path("control.sock")).await.unwrap();
    let ask = "GET /v1/hosts/beta/messages HTTP/1.1\r\nhost: rackbus\r\nconnection: close\r\n\r\n";
    node.write_all(ask.as_bytes()).await.unwrap();
    let flood = async {
        // Each of them is answered into the node's queue.
        for _ in 0..100 {
            let said = std::iter::repeat_with(|| register("beta", false)).take(1000).collect();
            control.say("beta", said).await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, flood).await.expect("the control plane stalls");
    let mut got = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, node.read_to_end(&mut got)).await;
    ended.expect("all of it was queued").unwrap();
    assert!(got.len() < 4 << 20, "{} bytes were kept for it", got.len());
    let counted = async {
        loop {
            let status = control.client.status().await.unwrap();
            let beta = status.hosts.iter().find(|h| h.host == "beta").unwrap();
            if beta.overruns > 0 {
                return beta.overruns;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let counted = tokio::time::timeout(PATIENCE, counted).await;
    assert_eq!(counted.expect("it is not counted"), 1);
}

#[tokio::test]
async fn a_node_that_is_silent_is_a_fault_and_so_is_its_return() {
    let control = Control::start_as(None, Config { silence: 400, ..Config::default() }).await;
    let told = async |text: &str, speaks: bool| {
        let looked = async {
            loop {
                if speaks {
                    control.say("alpha", Vec::new()).await.unwrap();
                }
                let faults = control.events(Some(EventKind::Fault)).await;
                if faults.iter().any(|fault| fault.text.starts_with(text)) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, looked).await.expect("nobody tells of it");
    };
    told("the node of alpha has not been heard from for 0 s", false).await;
    told("the node of alpha is heard from again", true).await;
    let faults = control.events(Some(EventKind::Fault)).await;
    let of_alpha = faults.iter().filter(|fault| fault.host.as_deref() == Some("alpha"));
    assert!(of_alpha.count() >= 2, "{faults:?}");
}
