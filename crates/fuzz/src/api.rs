//! Requests to the control plane's HTTP API, of users and of nodes, without a network: the router
//! is called as the server calls it. Callers that wait too long go away.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::connect_info::MockConnectInfo;
use axum::http::{Method, Request, StatusCode, header};
use axum::response::Response;
use http_body_util::BodyExt;
use rackbus_control::access::ApiPeer;
use rackbus_control::api::{ApiError, Lease, NodeMessages, RackStatus};
use rackbus_control::http::routes;
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, Message};
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::input::Input;

/// Words that requests consist of, for the fuzzer's dictionary.
pub const WORDS: &[&str] = &[
    "/v1/leases",
    "/v1/status",
    "/v1/devices",
    "/v1/path?from=alpha&to=beta",
    "/v1/events",
    "/v1/changes",
    "?kind=fault&most=3",
    "idempotency-key: ",
    "/v1/hosts/alpha/messages",
    "/v1/hosts/beta/messages",
    "?all=true",
    "/openapi.json",
    "{\"function\":\"alpha/nvme0\",\"borrower\":\"beta\"}",
    "{\"messages\":[",
    "\"type\":\"armed\"",
    "\"register\"",
    "\"renew\"",
    "\"arm_failed\"",
    "\"revoked\"",
    "\"closed\"",
    "\"lost\"",
    "\"incarnation\":1",
    "\"device\":\"nvme0\"",
    "\"epoch\":1",
    "\"lease\":1",
    "\"newest_lease\":",
    "\"address\":\"\"",
];

const METHODS: [&str; 6] = ["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"];
const HOSTS: [&str; 3] = ["alpha", "beta", "nobody"];
const FUNCTIONS: [&str; 4] = ["alpha/nvme0", "beta/nvme1", "alpha/nothing", "nonsense"];
/// Requests of one input.
const MOST: usize = 32;
/// How long a caller waits. The answers that need no other caller take less.
const PATIENCE: Duration = Duration::from_millis(1);

fn service() -> Arc<Service> {
    let device = |name: &str| InventoryDevice {
        function: name.parse().expect("it is a name"),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    let inventory = Inventory {
        sections: Default::default(),
        rack: "lab".to_owned(),
        hosts: vec!["alpha".to_owned(), "beta".to_owned()],
        devices: vec![device("alpha/nvme0"), device("beta/nvme1")].into(),
        ..Inventory::default()
    };
    // SQLite's name for a database in memory.
    let options = ServiceOptions {
        inventory,
        read_rack: None,
        read_file: None,
        config: Config::default(),
        database: ":memory:".into(),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    };
    Service::open(options).expect("it begins with nothing")
}

/// A request as the input tells it; `None` when HTTP has none like it.
fn request(input: &mut Input<'_>) -> Option<Request<Body>> {
    let choice = input.u8();
    let host = HOSTS[usize::from(choice >> 4) % HOSTS.len()];
    let (method, uri, body) = match choice & 15 {
        0..=3 => {
            let method = METHODS[usize::from(choice >> 4) % METHODS.len()];
            let uri = String::from_utf8_lossy(input.short()).into_owned();
            (method, uri, input.short().to_vec())
        }
        4 | 5 => {
            let function = FUNCTIONS[usize::from(input.u8()) % FUNCTIONS.len()];
            let body = serde_json::json!({ "function": function, "borrower": host });
            ("POST", "/v1/leases".to_owned(), body.to_string().into_bytes())
        }
        6 => ("DELETE", format!("/v1/leases/{}", input.number()), Vec::new()),
        7 => ("GET", format!("/v1/hosts/{host}/messages"), Vec::new()),
        8 => ("GET", format!("/v1/leases?all={}", choice & 16 != 0), Vec::new()),
        _ => {
            let uri = format!("/v1/hosts/{host}/messages");
            let length = usize::from(input.u16() & 0xfff);
            ("POST", uri, [b"{\"messages\":[", input.bytes(length), b"]}"].concat())
        }
    };
    let kind = if choice == 0xff { "text/plain" } else { "application/json" };
    let mut request = Request::builder().method(method).uri(uri).header(header::CONTENT_TYPE, kind);
    if choice & 32 != 0 {
        // Short, so that one comes again.
        let length = usize::from(input.u8() & 3);
        request = request.header("idempotency-key", input.bytes(length));
    }
    request.body(Body::from(body)).ok()
}

/// Looks at an answer: every refusal says why, in JSON where it is this API's, and where an answer has a body at all.
async fn check(method: Method, response: Response) {
    if method == Method::HEAD {
        return;
    }
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE).cloned();
    if kind.as_ref().is_some_and(|kind| kind == "application/x-ndjson") {
        return;
    }
    let body = response.into_body().collect().await.expect("a body in memory").to_bytes();
    if kind.is_some_and(|kind| kind == "application/json") {
        let value: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        assert!(body.is_empty() || !value.is_null() || body == "null"[..], "{status}: no JSON");
        if !status.is_success() {
            let error: ApiError = serde_json::from_value(value).expect("a refusal is an ApiError");
            assert_ne!(error.code, "ending", "the writer is gone: {error:?}");
        }
    }
    assert!(status != StatusCode::INTERNAL_SERVER_ERROR || !body.is_empty(), "no reason is told");
}

async fn get<T: serde::de::DeserializeOwned>(router: &Router, uri: &str) -> T {
    let asked = Request::get(uri).body(Body::empty()).expect("it is right");
    let response = router.clone().oneshot(asked).await.expect("it answers");
    assert_eq!(response.status(), StatusCode::OK, "{uri}");
    let body = response.into_body().collect().await.expect("a body in memory").to_bytes();
    serde_json::from_slice(&body).expect("it answers as its document says")
}

async fn converse(mut input: Input<'_>) {
    // This process may speak for any host.
    let process = i32::try_from(std::process::id()).ok();
    let router = routes(service()).layer(MockConnectInfo(ApiPeer::Local(process)));
    let mut callers: Vec<JoinHandle<()>> = Vec::new();
    let mut count = 0;
    while !input.is_empty() && count < MOST {
        count += 1;
        let Some(request) = request(&mut input) else { continue };
        let router = router.clone();
        let mut caller = tokio::spawn(async move {
            let method = request.method().clone();
            check(method, router.oneshot(request).await.expect("it answers")).await;
        });
        // Who has no answer yet waits on while others ask.
        match tokio::time::timeout(PATIENCE, &mut caller).await {
            Ok(ended) => ended.expect("a request ends in an answer"),
            Err(_) => callers.push(caller),
        }
    }
    for caller in callers {
        caller.abort();
        if let Err(ended) = caller.await {
            assert!(ended.is_cancelled(), "{ended}");
        }
    }
    let status: RackStatus = get(&router, "/v1/status").await;
    assert_eq!(status.hosts.len(), 2);
    let _: Vec<Lease> = get(&router, "/v1/leases?all=true").await;
}

/// Asks what `data` says.
pub fn run(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("there is room for it").block_on(converse(Input::new(data)));
}

/// A lease from its beginning to its end, and each path by itself.
pub fn seeds() -> Vec<Vec<u8>> {
    let say = |host: u8, message: &Message| {
        let said = NodeMessages { messages: vec![message.clone()], report: None };
        let text = serde_json::to_string(&said).expect("it is plain data");
        let text = &text["{\"messages\":[".len()..text.len() - 2];
        let mut bytes = vec![9 | host << 4];
        bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
        bytes
    };
    let register = |devices: &[&str]| Message::Register {
        incarnation: 1,
        devices: devices.iter().map(|name| (name.to_string(), 0)).collect(),
        newest_lease: 0,
        address: "here".to_owned(),
    };
    let armed =
        Message::Armed { incarnation: 1, device: "nvme0".to_owned(), epoch: 1, change: None };
    let raw = |method: u8, uri: &str, body: &str| {
        let mut bytes = vec![method << 4, uri.len() as u8];
        bytes.extend_from_slice(uri.as_bytes());
        bytes.push(body.len() as u8);
        bytes.extend_from_slice(body.as_bytes());
        bytes
    };
    let lend = [
        vec![7, 0x17],
        say(0, &register(&["nvme0"])),
        say(1, &register(&["nvme1"])),
        vec![0x14, 0],
        say(0, &armed),
        vec![6, 1],
        vec![0x18],
    ]
    .concat();
    let mut seeds = vec![lend];
    for uri in ["/v1/status", "/v1/devices", "/v1/leases?all=true", "/v1/leases/1", "/v1/events"] {
        seeds.push(raw(0, uri, ""));
    }
    seeds.push(raw(0, "/v1/path?from=alpha/nvme0&to=beta", ""));
    seeds.push(raw(0, "/openapi.json", ""));
    seeds.push(raw(1, "/v1/leases", "{\"function\":\"alpha/nvme0\",\"borrower\":\"beta\"}"));
    seeds.push(raw(1, "/v1/hosts/alpha/messages", "{\"messages\":[]}"));
    seeds
}
