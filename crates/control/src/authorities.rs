//! The rack's certificate authority is replaced, as the API has it: the steps, and who holds them up.
//!
//! What is decided is in [`register`](crate::register). Nodes and people learn of it by what they ask anyway, and get new
//! certificates by themselves; a control plane makes its own ([`renew`]).

use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::Method;
use rackbus_identity::{
    AuthorityBundle, AuthorityError, CertificateAuthority, Credentials, Renewed, Subject,
    fingerprint_of, issuer_of, now,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::{OpenApi, ToSchema};

use crate::answers::KeyedChange;
use crate::api::ApiError;
use crate::certificates::Certificate;
use crate::client::{ControlClient, ControlClientError};
use crate::http::key;
use crate::leaders::TlsSource;
use crate::machines::{self, RackAdmission};
use crate::register::{
    AuthorityRecord, AuthoritySet, NextAuthority, RegisterOutcome, RotationStep,
};
use crate::service::problem;

/// How long a control plane waits before it looks again whether its own certificate is to be renewed.
const LOOK: Duration = Duration::from_secs(3600);
/// How long is waited after a certificate that could not be made.
const AGAIN: Duration = Duration::from_secs(5);

/// The authorities of a rack, as they sign: made of what is stored, once for each that there is.
#[derive(Debug)]
pub struct KnownAuthorities {
    first: AuthoritySet,
    newest: Mutex<(AuthoritySet, Arc<AuthorityBundle>)>,
}

impl KnownAuthorities {
    /// Of a rack whose first authority this is.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn new(first: &CertificateAuthority) -> Result<KnownAuthorities, AuthorityError> {
        let (certificate, key) = first.pem();
        let first = AuthoritySet::first(certificate, key);
        let newest = Mutex::new((first.clone(), Arc::new(bundle_of(&first)?)));
        Ok(KnownAuthorities { first, newest })
    }

    /// What the rack has where nothing is stored.
    pub fn first(&self) -> &AuthoritySet {
        &self.first
    }

    /// What signs and is trusted where the rack has the authorities of `set`, or its first one alone.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn bundle(
        &self,
        set: Option<&AuthoritySet>,
    ) -> Result<Arc<AuthorityBundle>, AuthorityError> {
        let set = set.unwrap_or(&self.first);
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.0 != *set {
            *newest = (set.clone(), Arc::new(bundle_of(set)?));
        }
        Ok(newest.1.clone())
    }
}

fn bundle_of(set: &AuthoritySet) -> Result<AuthorityBundle, AuthorityError> {
    let signing = CertificateAuthority::from_pem(&set.signing.certificate, &set.signing.key)?;
    AuthorityBundle::new(signing, &set.others())
}

/// What signs the certificate by which a control plane asks others: the newest authority, which all of them know before anybody
/// else does. Trusted is beside it the one that signs what they show, and none that did before.
fn newest_bundle_of(set: &AuthoritySet) -> Result<AuthorityBundle, AuthorityError> {
    let Some(NextAuthority { authority, .. }) = &set.next else {
        let signing = CertificateAuthority::from_pem(&set.signing.certificate, &set.signing.key)?;
        return AuthorityBundle::new(signing, &[]);
    };
    let newest = CertificateAuthority::from_pem(&authority.certificate, &authority.key)?;
    AuthorityBundle::new(newest, &[&set.signing.certificate])
}

/// What a control plane shows: to whoever connects to it, by the authority that everybody trusts, and to the control planes that
/// it connects to itself, by the newest one: who has the key of the one before can make the others.
#[derive(Debug, Clone)]
pub struct ControlCredentials {
    /// Shown to whoever connects.
    pub serving: Renewed,
    /// Shown to other control planes.
    pub asking: Renewed,
}

impl ControlCredentials {
    /// New ones, in a rack with the authorities of `set`, or with its first one alone.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn new(
        known: &KnownAuthorities,
        set: Option<&AuthoritySet>,
    ) -> Result<ControlCredentials, AuthorityError> {
        let shared = |own: Credentials| Arc::new(RwLock::new(own));
        let serving = shared(known.bundle(set)?.issue(&Subject::Control)?);
        let asking = newest_bundle_of(set.unwrap_or(&known.first))?.issue(&Subject::Control)?;
        Ok(ControlCredentials { serving, asking: shared(asking) })
    }

    /// Has both be of the authorities that there are, and good.
    fn renew(
        &self,
        known: &KnownAuthorities,
        set: Option<&AuthoritySet>,
    ) -> Result<(), AuthorityError> {
        // Who hears of the new authorities by what is shown must find that they are known.
        renew_by(&self.serving, &*known.bundle(set)?)?;
        renew_by(&self.asking, &newest_bundle_of(set.unwrap_or(&known.first))?)
    }
}

/// Has these be what `bundle` would give out now.
fn renew_by(credentials: &Renewed, bundle: &AuthorityBundle) -> Result<(), AuthorityError> {
    let own = credentials.read().unwrap_or_else(PoisonError::into_inner).clone();
    if own.is_due() || !own.are_of(bundle.fingerprints()) {
        let next = bundle.issue(&Subject::Control)?;
        *credentials.write().unwrap_or_else(PoisonError::into_inner) = next;
    }
    Ok(())
}

/// Keeps the control plane's own certificates of the authorities that there are, and good, until nobody says any more which
/// these are.
pub async fn renew(
    known: Arc<KnownAuthorities>,
    mut authorities: watch::Receiver<Option<AuthoritySet>>,
    credentials: ControlCredentials,
) {
    loop {
        let set = authorities.borrow_and_update().clone();
        let wait = match credentials.renew(&known, set.as_ref()) {
            Ok(()) => LOOK,
            Err(error) => {
                tracing::error!(%error, "the certificate was not renewed");
                AGAIN
            }
        };
        if let Ok(Err(_)) = tokio::time::timeout(wait, authorities.changed()).await {
            return;
        }
    }
}

/// Where the processes of the control plane are, and what is shown to them.
#[derive(Clone)]
pub struct ControlPlanesSource {
    /// The addresses (`HOST:PORT`) as they are known now.
    pub addresses: Arc<dyn Fn() -> Vec<String> + Send + Sync>,
    /// The certificate that is shown to them, and the authorities that theirs must be of.
    pub tls: TlsSource,
}

impl std::fmt::Debug for ControlPlanesSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlPlanesSource").finish_non_exhaustive()
    }
}

impl ControlPlanesSource {
    /// What each shows in TLS.
    async fn look(&self) -> Vec<ControlPlaneAuthority> {
        let looks = (self.addresses)().into_iter().map(|address| async {
            let shown = machines::connect(&address, (self.tls)()).await.map(|stream| {
                let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
                issuer_of(chain)
            });
            match shown {
                Ok(authority) => ControlPlaneAuthority { address, authority, error: None },
                Err(error) => {
                    let error = Some(error.to_string());
                    ControlPlaneAuthority { address, authority: None, error }
                }
            }
        });
        let mut shown = Vec::new();
        // A few, one after the other.
        for look in looks {
            shown.push(look.await);
        }
        shown
    }
}

/// What a certificate authority is for at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthorityPart {
    /// Certificates are made by it from now on.
    Signs,
    /// It makes none yet: it is to, when everybody trusts it.
    Introduced,
    /// It did, and is trusted until it is retired.
    Retiring,
}

/// One certificate authority of the rack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrustedAuthority {
    /// The rack's first one has 0, and each later one the next number.
    pub number: u64,
    /// SHA-256 of its certificate, in hexadecimal digits.
    pub fingerprint: String,
    /// What it is for at present.
    pub part: AuthorityPart,
}

/// What a process of the control plane shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ControlPlaneAuthority {
    /// Where it is reached, as `HOST:PORT`.
    pub address: String,
    /// The fingerprint of the authority that made its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// Why that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The certificate authorities of the rack, for everybody in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fingerprints {
    /// Their fingerprints, that of the one that signs first.
    pub authorities: Vec<String>,
}

/// How far a certificate authority is replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuthorityStatus {
    /// All that are trusted, the one that signs first.
    pub authorities: Vec<TrustedAuthority>,
    /// The certificates that the next step waits for: of who does not trust the authority that is to sign, or has one of that
    /// which is to be retired.
    pub behind: Vec<Certificate>,
    /// The processes of the control plane.
    pub control_planes: Vec<ControlPlaneAuthority>,
}

/// Asks for a step of a rotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RotationRequest {
    /// Whether it is taken also where that cuts somebody off.
    pub force: bool,
}

/// What came of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RotationAnswer {
    /// What the newest authority is for since: it is introduced, or signs.
    pub newest: AuthorityPart,
    /// Of whom certificates are of no more use by it, as these name them.
    pub cut_off: Vec<String>,
}

type Shared = State<Arc<RackAdmission>>;

/// The certificate authorities that are trusted.
#[utoipa::path(get, path = "/v1/authorities", responses((status = 200, body = Fingerprints)))]
async fn fingerprints(State(admission): Shared) -> Result<Json<Fingerprints>, ApiError> {
    let (bundle, _) = admission.authorities()?;
    Ok(Json(Fingerprints { authorities: bundle.fingerprints().to_vec() }))
}

/// How far the certificate authority is replaced, and who holds it up.
#[utoipa::path(get, path = "/v1/authorities/status", responses((status = 200, body = AuthorityStatus)))]
async fn status(State(admission): Shared) -> Result<Json<AuthorityStatus>, ApiError> {
    let (set, behind) = {
        let register = admission.service().register();
        let behind = register.behind(now()).map(|it| Certificate::from((&it.certified, None)));
        let behind: Vec<Certificate> = behind.collect();
        (register.authorities().cloned(), behind)
    };
    let set = set.unwrap_or_else(|| admission.first_authority().clone());
    let next = set.next.iter().map(|it| {
        (it.authority.number, it.authority.certificate.as_str(), AuthorityPart::Introduced)
    });
    let last = set.last.iter();
    let last = last.map(|it| (it.number, it.certificate.as_str(), AuthorityPart::Retiring));
    let signing = (set.signing.number, set.signing.certificate.as_str(), AuthorityPart::Signs);
    let all = [signing].into_iter().chain(next).chain(last);
    let trusted = |(number, certificate, part)| {
        let fingerprint = fingerprint_of(certificate).unwrap_or_default();
        TrustedAuthority { number, fingerprint, part }
    };
    let control_planes = match admission.control_planes() {
        Some(source) => source.look().await,
        None => Vec::new(),
    };
    Ok(Json(AuthorityStatus { authorities: all.map(trusted).collect(), behind, control_planes }))
}

/// What came of a request for a step. Of one that had been done before nobody is named any more: the events do.
fn stepped(admission: &RackAdmission, done: RegisterOutcome) -> RotationAnswer {
    let is_introduced = match &done.step {
        Some(step) => matches!(step, RotationStep::Introduced(_)),
        None => {
            let register = admission.service().register();
            register.authorities().is_some_and(|it| it.next.is_some())
        }
    };
    let newest = if is_introduced { AuthorityPart::Introduced } else { AuthorityPart::Signs };
    let cut_off = done.step.iter().flat_map(RotationStep::cut_off).map(Subject::to_string);
    RotationAnswer { newest, cut_off: cut_off.collect() }
}

/// Begins to replace the certificate authority by a new one. Where that is there already and not trusted by everybody, it signs
/// from then on, with `force`.
#[utoipa::path(post, path = "/v1/authorities", request_body = RotationRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = RotationAnswer),
    (status = 409, body = ApiError, description = "One is replaced already"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn rotate(
    State(admission): Shared,
    headers: HeaderMap,
    Json(asked): Json<RotationRequest>,
) -> Result<Json<RotationAnswer>, ApiError> {
    let keyed = KeyedChange::new(key(&headers)?, "rotate", &asked);
    let first = admission.first_authority().clone();
    let unmade = |error: AuthorityError| {
        problem("not_stored", error.to_string(), "see to the control plane's machine")
    };
    let rack = admission.service().rack();
    let (bundle, _) = admission.authorities()?;
    let made = bundle.successor(&rack).map_err(unmade)?;
    let (certificate, key) = made.pem();
    // Which number it has is decided with all else.
    let next = AuthorityRecord { number: 0, certificate: certificate.to_owned(), key };
    let done = admission.service().rotate(first, next, asked.force, keyed).await?;
    Ok(Json(stepped(&admission, done)))
}

/// Ends the certificate authority that was replaced: its certificates are refused from then on. Where some are in use, they are
/// revoked, with `force`.
#[utoipa::path(post, path = "/v1/authorities/retire", request_body = RotationRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = RotationAnswer),
    (status = 409, body = ApiError, description = "None is to be retired, or certificates of it are in use"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn retire(
    State(admission): Shared,
    headers: HeaderMap,
    Json(asked): Json<RotationRequest>,
) -> Result<Json<RotationAnswer>, ApiError> {
    let keyed = KeyedChange::new(key(&headers)?, "retire", &asked);
    let done = admission.service().retire(asked.force, keyed).await?;
    Ok(Json(stepped(&admission, done)))
}

/// What of the OpenAPI document is about certificate authorities.
#[derive(OpenApi)]
#[openapi(
    paths(fingerprints, status, rotate, retire),
    components(schemas(
        Fingerprints,
        AuthorityStatus,
        TrustedAuthority,
        AuthorityPart,
        ControlPlaneAuthority,
        RotationRequest,
        RotationAnswer
    ))
)]
pub(crate) struct Document;

/// The routes of certificate authorities.
pub(crate) fn routes() -> Router<Arc<RackAdmission>> {
    Router::new()
        .route("/v1/authorities", get(fingerprints).post(rotate))
        .route("/v1/authorities/status", get(status))
        .route("/v1/authorities/retire", post(retire))
}

impl ControlClient {
    /// The fingerprints of the rack's certificate authorities, that of the one that signs first.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn authorities(&self) -> Result<Vec<String>, ControlClientError> {
        let found: Fingerprints = self.get("/v1/authorities").await?;
        Ok(found.authorities)
    }

    /// How far the certificate authority is replaced, and who holds it up.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn authority_status(&self) -> Result<AuthorityStatus, ControlClientError> {
        self.get("/v1/authorities/status").await
    }

    /// Begins to replace the certificate authority, or has the new one sign.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn rotate_authority(
        &self,
        force: bool,
    ) -> Result<RotationAnswer, ControlClientError> {
        self.change(Method::POST, "/v1/authorities", &RotationRequest { force }).await
    }

    /// Ends the certificate authority that was replaced.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn retire_authority(
        &self,
        force: bool,
    ) -> Result<RotationAnswer, ControlClientError> {
        self.change(Method::POST, "/v1/authorities/retire", &RotationRequest { force }).await
    }
}
