//! Revocations and steps of a rotation that are repeated with their keys, as the API has them: what was given out since stays good.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use rackbus_control::access::ApiPeer;
use rackbus_control::authorities::KnownAuthorities;
use rackbus_control::machines::{Joining, all_routes};
use rackbus_control::store::MemoryStore;
use rackbus_identity::{CertificateAuthority, CertificateRequest, Tokens};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::life::Life;

/// The API of one life of the control plane, as processes of its machine ask it.
struct Api {
    routes: axum::Router,
}

impl Api {
    fn of(life: &Life, folder: &std::path::Path) -> Api {
        Api::of_hosts(life, folder, &["alpha", "beta"])
    }

    /// The same, of a rack that has these hosts.
    fn of_hosts(life: &Life, folder: &std::path::Path, hosts: &[&str]) -> Api {
        let authority = CertificateAuthority::open(folder, "lab").unwrap();
        let tokens = Tokens::open(folder, authority.fingerprint()).unwrap();
        let authorities = Arc::new(KnownAuthorities::new(&authority).unwrap());
        let hosts = hosts.iter().map(|&host| host.to_owned()).collect();
        let joining = Joining::new(authorities, tokens, hosts, String::new());
        Api { routes: all_routes(life.service.clone(), Arc::new(joining)) }
    }

    async fn post(&self, path: &str, key: &str, body: Value) -> (StatusCode, Value) {
        let request = Request::post(path)
            .header("content-type", "application/json")
            .header("idempotency-key", key)
            .extension(ConnectInfo(ApiPeer::Local(None)))
            .body(Body::from(body.to_string()));
        let response = self.routes.clone().oneshot(request.unwrap()).await.unwrap();
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    async fn token(&self, key: &str) -> String {
        let (_, made) =
            self.post("/v1/tokens", key, json!({ "host": "beta", "seconds": 60 })).await;
        made["token"].as_str().unwrap().to_owned()
    }

    /// The host beta joins.
    async fn join(&self, token: &str) -> StatusCode {
        let request = CertificateRequest::new().unwrap();
        let asked = json!({ "host": "beta", "token": token, "request": request.text() });
        self.post("/v1/join", "unused", asked).await.0
    }

    /// All that beta has is revoked; how many certificates and tokens that were, and by which revocation.
    async fn revoke(&self, key: &str) -> (u64, u64, u64) {
        let (status, done) = self.post("/v1/revocations", key, json!({ "host": "beta" })).await;
        assert_eq!(status, StatusCode::OK, "{done}");
        let number = |name: &str| done[name].as_u64().unwrap();
        (number("certificates"), number("tokens"), number("version"))
    }
}

/// Of each certificate, the revocation that it is covered by.
fn revoked(life: &Life) -> Vec<Option<u64>> {
    let mut revoked: Vec<_> = life.service.certificates().iter().map(|it| it.revoked).collect();
    revoked.sort();
    revoked
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_joined_since_is_not_revoked_by_a_repeated_request() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let folder = tempfile::tempdir().unwrap();
    let mut life = Life::start(&store, &full);
    let mut api = Api::of(&life, folder.path());
    assert_eq!(api.join(&api.token("first").await).await, StatusCode::OK);
    let unused = api.token("unused").await;
    assert_eq!(api.revoke("revoke").await, (1, 1, 1));
    assert_eq!(api.join(&unused).await, StatusCode::FORBIDDEN);
    assert_eq!(api.join(&api.token("second").await).await, StatusCode::OK);
    assert_eq!(revoked(&life), [None, Some(1)]);
    // The answer was lost.
    let since = api.token("since").await;
    assert_eq!(api.revoke("revoke").await, (1, 0, 1));
    assert_eq!(revoked(&life), [None, Some(1)]);
    assert_eq!(api.join(&since).await, StatusCode::OK);
    assert_eq!(api.revoke("again").await, (2, 0, 2));
    assert_eq!(revoked(&life), [Some(2), Some(2), Some(2)]);
    // The next life knows the keys, too.
    life.crash().await;
    life = Life::start(&store, &full);
    api = Api::of(&life, folder.path());
    assert_eq!(api.join(&api.token("third").await).await, StatusCode::OK);
    assert_eq!((api.revoke("revoke").await.2, api.revoke("again").await.2), (1, 2));
    assert_eq!(revoked(&life), [None, Some(2), Some(2), Some(2)]);
    let other = api.post("/v1/revocations", "revoke", json!({ "user": "ann" })).await;
    assert_eq!(other.0, StatusCode::UNPROCESSABLE_ENTITY, "{}", other.1);
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_the_rack_has_no_more_is_revoked_and_one_that_it_never_had_is_not() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let folder = tempfile::tempdir().unwrap();
    let life = Life::start(&store, &full);
    let before = Api::of(&life, folder.path());
    assert_eq!(before.join(&before.token("token").await).await, StatusCode::OK);
    let after = Api::of_hosts(&life, folder.path(), &["alpha"]);
    assert_eq!(after.revoke("revoke").await, (1, 0, 1));
    let (status, _) = after.post("/v1/revocations", "other", json!({ "host": "bet" })).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "a name that is mistyped is refused");
}

/// The new authority is introduced, and a second request has it sign by force, which cuts off beta: it trusts the old one alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_step_of_a_rotation_is_done_once_and_names_nobody_twice() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let folder = tempfile::tempdir().unwrap();
    let life = Life::start(&store, &full);
    let api = Api::of(&life, folder.path());
    assert_eq!(api.join(&api.token("token").await).await, StatusCode::OK);
    let rotate = |key: &'static str, force: bool| {
        api.post("/v1/authorities", key, json!({ "force": force }))
    };
    for _ in 0..2 {
        let (status, said) = rotate("introduce", false).await;
        assert_eq!(
            (status, &said),
            (StatusCode::OK, &json!({ "newest": "introduced", "cut_off": [] }))
        );
    }
    let (status, said) = rotate("force", true).await;
    assert_eq!(status, StatusCode::OK, "{said}");
    assert_eq!(said["newest"], "signs");
    assert_eq!(said["cut_off"].as_array().map(Vec::len), Some(1), "{said}");
    let (status, said) = rotate("force", true).await;
    assert_eq!((status, &said), (StatusCode::OK, &json!({ "newest": "signs", "cut_off": [] })));
    life.crash().await;
}
