//! The API of one control plane among several: who leads answers; who does not says who does.
//!
//! A leader is asked before and after each answer whether its time is over, and what it says without end (to nodes,
//! of events) ends with its leadership. Processes of a machine whose control plane does not lead are answered by the
//! leader anyway: they are passed on.

use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hyper::body::Frame;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tower::ServiceExt;
use utoipa::ToSchema;

use super::candidate::{Candidacy, Standing};
use super::election::Member;
use super::members::{Members, StoreHealth};
use super::tenure::Tenure;
use crate::access::{self, ApiPeer};
use crate::api::ApiError;
use crate::leaders::{LEADER, Leaders, TlsSource};
use crate::metrics::MetricsPage;
use crate::service::{OpenError, Service, problem};

/// How long an election takes, at most.
const ELECTION: Duration = Duration::from_secs(8);
/// Between two looks whether it is over.
const LOOK: Duration = Duration::from_millis(50);
/// Before a leadership that could not be taken up is given up.
const AGAIN: Duration = Duration::from_millis(500);

/// The control plane of a rack as one of its processes sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ControlStatus {
    /// Name of the rack.
    pub rack: String,
    /// What the state is kept in: `sqlite` or `etcd`.
    pub store: String,
    /// The control plane that gives this answer; nothing where there is only one.
    #[serde(default)]
    pub answers: Option<Member>,
    /// Whether that is the leader.
    pub leads: bool,
    /// The leader, where it is known.
    #[serde(default)]
    pub leader: Option<Member>,
    /// The term of who answers, where it leads.
    #[serde(default)]
    pub term: Option<u64>,
    /// All that are there.
    #[serde(default)]
    pub members: Vec<Member>,
    /// How the store is.
    pub health: StoreHealth,
}

/// Makes the service of a leader, and its routes.
pub type OpenService =
    Box<dyn Fn(Arc<Tenure>) -> Result<(Arc<Service>, Router), OpenError> + Send + Sync>;

/// One control plane among several.
pub struct ControlPlane {
    rack: String,
    own: Member,
    standing: watch::Receiver<Standing>,
    members: watch::Receiver<Members>,
    leading: RwLock<Option<Leading>>,
    leaders: Arc<Leaders>,
}

/// What a leader answers with.
#[derive(Clone)]
struct Leading {
    tenure: Arc<Tenure>,
    service: Arc<Service>,
    routes: Router,
}

impl std::fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlPlane").field("own", &self.own).finish_non_exhaustive()
    }
}

impl ControlPlane {
    /// The front of `own`, which does as its candidacy says; `open` begins to lead. `tls` shows this control plane
    /// to the leader.
    pub fn start(
        rack: &str,
        own: Member,
        candidacy: Candidacy,
        tls: TlsSource,
        open: OpenService,
    ) -> Arc<ControlPlane> {
        let Candidacy { standing, members } = candidacy;
        let front = Arc::new(ControlPlane {
            rack: rack.to_owned(),
            own,
            standing,
            members,
            leading: RwLock::default(),
            leaders: Arc::new(Leaders::new([], tls)),
        });
        tokio::spawn(front.clone().lead(Arc::new(open)));
        front
    }

    /// Leads whenever that is its turn.
    async fn lead(self: Arc<Self>, open: Arc<OpenService>) {
        let mut standing = self.standing.clone();
        loop {
            let now = standing.borrow_and_update().clone();
            if let Standing::Leads(tenure) = now {
                let (open, held) = (open.clone(), tenure.clone());
                match tokio::task::spawn_blocking(move || open(held)).await {
                    Ok(Ok((service, routes))) => {
                        self.set(Some(Leading { tenure: tenure.clone(), service, routes }));
                        tenure.ended().await;
                        self.set(None);
                    }
                    Ok(Err(error)) => {
                        tracing::error!(%error, "this control plane cannot lead");
                        tokio::time::sleep(AGAIN).await;
                        tenure.end();
                    }
                    Err(_) => tenure.end(),
                }
            }
            if standing.changed().await.is_err() {
                return;
            }
        }
    }

    fn set(&self, leading: Option<Leading>) {
        *self.leading.write().unwrap_or_else(PoisonError::into_inner) = leading;
    }

    fn leading(&self) -> Option<Leading> {
        let leading = self.leading.read().unwrap_or_else(PoisonError::into_inner).clone();
        leading.filter(|leading| !leading.tenure.is_over())
    }

    /// Waits until this one has given up the leadership.
    pub async fn resigned(&self) {
        let mut standing = self.standing.clone();
        // Its candidacy has ended when nobody says more.
        while standing.changed().await.is_ok() {}
    }

    /// Who leads, as far as it is known here.
    fn leader(&self) -> Option<Member> {
        match &*self.standing.borrow() {
            Standing::Leads(tenure) => (!tenure.is_over()).then(|| self.own.clone()),
            Standing::Follows(leader) => leader.clone(),
            Standing::Unknown => None,
        }
    }

    /// How the control plane is, as this process sees it.
    pub fn status(&self) -> ControlStatus {
        let (leading, mut members) = (self.leading(), self.members.borrow().clone());
        // The store is looked at now and then: this one, and who leads, are there anyway.
        for known in [Some(self.own.clone()), self.leader()].into_iter().flatten() {
            if members.members.iter().all(|it| it.id != known.id) {
                members.members.push(known);
            }
        }
        ControlStatus {
            rack: self.rack.clone(),
            store: "etcd".to_owned(),
            answers: Some(self.own.clone()),
            leads: leading.is_some(),
            leader: self.leader(),
            term: leading.map(|leading| leading.tenure.term()),
            members: members.members,
            health: members.store,
        }
    }

    /// What is counted: of the whole rack where this leads.
    pub fn metrics(&self) -> MetricsPage {
        let leading = self.leading();
        let mut page =
            leading.as_ref().map(|leading| leading.service.metrics()).unwrap_or_default();
        let own = |value: f64| [(crate::metrics::Labels::new(), value)];
        let help = "Whether this control plane leads";
        page.gauge("control_leads", help, own(if leading.is_some() { 1.0 } else { 0.0 }));
        if let Some(leading) = &leading {
            let term = leading.tenure.term();
            page.gauge("control_term", "The term of the leader", own(term as f64));
        }
        let members = self.members.borrow();
        let count = members.members.len();
        page.gauge("control_members", "Control planes that are there", own(count as f64));
        let healthy = if members.store.healthy { 1.0 } else { 0.0 };
        page.gauge("control_store_healthy", "Whether the store answers", own(healthy));
        page.gauge(
            "control_store_bytes",
            "Size of the store's database",
            own(members.store.bytes as f64),
        );
        page
    }

    /// Waits until somebody leads, for as long as an election takes: who asks on this machine knows no other to ask.
    async fn settle(&self) {
        let until = tokio::time::Instant::now() + ELECTION;
        let settled = || {
            let other = self.leader().is_some_and(|leader| leader.id != self.own.id);
            other || self.leading().is_some()
        };
        while !settled() && tokio::time::Instant::now() < until {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The routes that everybody reaches.
    pub fn routes(self: &Arc<Self>) -> Router {
        let status = async |State(front): State<Arc<ControlPlane>>| Json(front.status());
        let scraped = self.clone();
        Router::new()
            .route("/v1/control", get(status))
            .fallback(dispatch)
            .with_state(self.clone())
            .merge(crate::metrics::routes(Arc::new(move || scraped.metrics())))
            .layer(axum::middleware::from_fn(access::check_alone))
    }

    /// That this one does not lead, and who does.
    fn refusal(&self) -> Response {
        let leader = self.leader().filter(|leader| leader.id != self.own.id);
        let (error, remedy) = match &leader {
            Some(leader) => (
                format!("this control plane is not the leader; the leader is at {}", leader.url),
                "ask there",
            ),
            None => (
                "this control plane is not the leader, and there is none at this moment".to_owned(),
                "try again; `rackbus control status` tells how the control planes and their store are",
            ),
        };
        let mut response = problem("not_the_leader", error, remedy).into_response();
        *response.status_mut() = StatusCode::MISDIRECTED_REQUEST;
        if let Some(url) = leader.and_then(|leader| HeaderValue::from_str(&leader.url).ok()) {
            response.headers_mut().insert(HeaderName::from_static(LEADER), url);
        }
        response
    }
}

/// The leadership ended while something was done: it may have been done.
fn ending() -> ApiError {
    let error = "this control plane is no longer the leader; what was asked for may have been done";
    problem("ending", error.to_owned(), "ask again with the same idempotency key")
}

async fn dispatch(
    State(front): State<Arc<ControlPlane>>,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    request: Request,
) -> Response {
    let local = matches!(peer, ApiPeer::Local(_));
    if local {
        front.settle().await;
    }
    let Some(leading) = front.leading() else {
        return match front.leader().filter(|leader| local && leader.id != front.own.id) {
            Some(leader) => {
                front.leaders.lead_by(leader.url.trim_start_matches("https://"));
                front.leaders.pass_on(request).await
            }
            None => front.refusal(),
        };
    };
    let answered = tokio::select! {
        answered = leading.routes.oneshot(request) => answered,
        () = leading.tenure.ended() => return ending().into_response(),
    };
    if leading.tenure.is_over() {
        return ending().into_response();
    }
    let answered = answered.unwrap_or_else(|never| match never {});
    answered.map(|body| {
        let tenure = leading.tenure.clone();
        let waited = tenure.clone();
        let ended = Box::pin(async move { waited.ended().await });
        Body::new(WhileLeading { body, tenure, ended })
    })
}

/// A body that breaks off when its leader leads no more.
struct WhileLeading {
    body: Body,
    tenure: Arc<Tenure>,
    /// Wakes who waits for the next of it.
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl HttpBody for WhileLeading {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // A machine that slept wakes up with timers that have not run meanwhile.
        if self.ended.as_mut().poll(context).is_ready() || self.tenure.is_over() {
            let ended = std::io::Error::other("this control plane is no longer the leader");
            return Poll::Ready(Some(Err(axum::Error::new(ended))));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }
}
