//! One control plane among several: what it answers while it leads, and while it does not.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::connect_info::MockConnectInfo;
use axum::http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use rackbus_control::access::ApiPeer;
use rackbus_control::api::ApiError;
use rackbus_control::leaders::LEADER;
use rackbus_control::leadership::candidate::{Candidacy, Standing};
use rackbus_control::leadership::core::Won;
use rackbus_control::leadership::election::Member;
use rackbus_control::leadership::members::Members;
use rackbus_control::leadership::serving::{ControlPlane, ControlStatus};
use rackbus_control::leadership::{Tenure, machine_clock};
use rackbus_control::service::Inventory;
use rackbus_control::store::MemoryStore;
use rackbus_control::{Service, ServiceOptions};
use rackbus_lease::Config;
use tokio::sync::watch;
use tower::ServiceExt;

const PATIENCE: Duration = Duration::from_secs(60);

fn member(name: &str) -> Member {
    let (id, url) = (name.to_owned(), format!("https://{name}:7420"));
    Member { id, url, version: "1".to_owned(), pid: 1 }
}

/// The front of `own`, and what says how it stands.
fn front() -> (Arc<ControlPlane>, watch::Sender<Standing>, watch::Sender<Members>) {
    let (said, standing) = watch::channel(Standing::Follows(Some(member("other"))));
    let (known, members) = watch::channel(Members::default());
    let open = |_| {
        let inventory = Inventory {
            rack: "lab".to_owned(),
            hosts: vec!["alpha".to_owned()],
            ..Inventory::default()
        };
        let options = ServiceOptions {
            inventory,
            read_rack: None,
            read_file: None,
            config: Config::default(),
            database: "unused".into(),
            log_lines_left_out: || 0,
            is_node: Arc::new(|_, _| true),
        };
        let service = Service::open_with(options, Box::new(MemoryStore::default()))?;
        let routes = rackbus_control::http::routes(service.clone());
        Ok((service, routes))
    };
    let candidacy = Candidacy { standing, members };
    let tls = Arc::new(|| unreachable!("nobody is passed on"));
    let front = ControlPlane::start("lab", member("own"), candidacy, tls, Box::new(open));
    (front, said, known)
}

fn tenure(time: u64) -> Arc<Tenure> {
    let clock = machine_clock();
    Arc::new(Tenure::new(Won { revision: 7, term: 3 }, clock() + time, clock))
}

async fn ask(routes: &Router, path: &str) -> Response<Body> {
    let request = Request::get(path).body(Body::empty()).unwrap();
    routes.clone().oneshot(request).await.unwrap()
}

async fn body<T: serde::de::DeserializeOwned>(response: Response<Body>) -> T {
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

/// Asks until it is answered.
async fn leads(routes: &Router) {
    let leads = async {
        while ask(routes, "/v1/status").await.status() != StatusCode::OK {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, leads).await.expect("it leads");
}

#[tokio::test]
async fn a_follower_names_the_leader_and_decides_nothing() {
    let (front, said, _members) = front();
    let routes = front.routes().layer(MockConnectInfo(ApiPeer::Node("alpha".to_owned(), None)));
    let refused = ask(&routes, "/v1/devices").await;
    assert_eq!(refused.status(), StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(refused.headers()[LEADER], "https://other:7420");
    let error: ApiError = body(refused).await;
    assert_eq!(error.code, "not_the_leader");
    assert!(error.error.ends_with("the leader is at https://other:7420"), "{error}");
    // How the control plane is, everybody is told by everyone.
    let status: ControlStatus = body(ask(&routes, "/v1/control").await).await;
    assert!(!status.leads && status.leader == Some(member("other")) && status.term.is_none());
    said.send_replace(Standing::Unknown);
    let refused = ask(&routes, "/v1/devices").await;
    assert!(!refused.headers().contains_key(LEADER));
    // Also who does not lead tells only those who may know.
    let strangers = front.routes().layer(MockConnectInfo(ApiPeer::Stranger));
    assert_eq!(ask(&strangers, "/v1/control").await.status(), StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn a_leader_answers_until_its_tenure_is_over_and_ends_its_streams_with_it() {
    let (front, said, _members) = front();
    let routes = front.routes().layer(MockConnectInfo(ApiPeer::Control(String::new())));
    let first = tenure(60_000);
    said.send_replace(Standing::Leads(first.clone()));
    leads(&routes).await;
    let status: ControlStatus = body(ask(&routes, "/v1/control").await).await;
    assert!(status.leads && status.term == Some(3) && status.leader == Some(member("own")));
    let mut events = ask(&routes, "/v1/events?follow=true").await.into_body();
    assert!(events.frame().await.unwrap().is_ok());
    first.end();
    let ended = async { while events.frame().await.is_some_and(|frame| frame.is_ok()) {} };
    tokio::time::timeout(PATIENCE, ended).await.expect("the stream ends");
    let refused = ask(&routes, "/v1/devices").await;
    assert_eq!(refused.status(), StatusCode::MISDIRECTED_REQUEST);
    // Another time, and one that ends by the clock alone.
    said.send_replace(Standing::Leads(tenure(60_000)));
    leads(&routes).await;
    said.send_replace(Standing::Leads(tenure(0)));
}

#[tokio::test]
async fn a_tenure_that_is_not_renewed_ends_by_the_clock_alone() {
    let tenure = tenure(50);
    tokio::time::timeout(PATIENCE, tenure.ended()).await.expect("nobody ended it");
    assert!(tenure.is_over());
    let again = machine_clock()() + 60_000;
    tenure.extend(again);
    assert!(tenure.is_over(), "what is over stays so");
}
