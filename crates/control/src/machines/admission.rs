//! Lets hosts and people in: their tokens, and the certificates that they get for them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_identity::{
    AuthorityBundle, AuthorityError, Bearer, Certified, KeyedCertificate, LONGEST_LIFE, Revoked,
    Subject, Token, TokenRefused, Tokens,
};

use super::{Certificates, NewToken};
use crate::api::ApiError;
use crate::authorities::{ControlPlanesSource, KnownAuthorities};
use crate::blocking::blocking;
use crate::events::Draft;
use crate::register::{AuthorityNumbers, AuthoritySet};
use crate::service::{OTHER_AUTHORITIES, Service, problem};

/// The shortest that a person's certificate is good, in seconds: clocks of machines differ.
pub(crate) const SHORTEST_PERSON_LIFE: u64 = 5;
/// The shortest that a host's is, in seconds: it is renewed in the last third, in which another control plane may have to begin
/// to lead.
pub(crate) const SHORTEST_NODE_LIFE: u64 = 20;

/// For how long certificates are good where `asked` (seconds) says so, or nobody does.
///
/// # Errors
/// `bad_request`, where no certificate is good for so long, or for less than `shortest` seconds.
pub(crate) fn certificate_life(
    asked: Option<u64>,
    shortest: u64,
    usual: Duration,
) -> Result<Duration, ApiError> {
    let life = asked.map_or(usual, Duration::from_secs);
    if (shortest..=LONGEST_LIFE.as_secs()).contains(&life.as_secs()) {
        return Ok(life);
    }
    let error = format!("a certificate cannot be good for {} s", life.as_secs());
    let days = LONGEST_LIFE.as_secs() / (24 * 3600);
    Err(problem("bad_request", error, &format!("choose {shortest} s to {days} days")))
}

/// What hosts join by.
#[derive(Debug)]
pub struct Joining {
    authorities: Arc<KnownAuthorities>,
    tokens: Mutex<Tokens>,
    hosts: Vec<String>,
    pub(super) rack_file: String,
    /// The processes of the control plane, where it is known how they are reached.
    pub(crate) control_planes: Option<ControlPlanesSource>,
}

impl Joining {
    /// For a rack of these hosts, which its file describes; with its authorities, and its tokens.
    pub fn new(
        authorities: Arc<KnownAuthorities>,
        tokens: Tokens,
        hosts: Vec<String>,
        rack_file: String,
    ) -> Joining {
        let (tokens, control_planes) = (Mutex::new(tokens), None);
        Joining { authorities, tokens, hosts, rack_file, control_planes }
    }

    /// The same, which finds out what the processes of the control plane show.
    #[must_use]
    pub fn with_control_planes(self, source: ControlPlanesSource) -> Joining {
        Joining { control_planes: Some(source), ..self }
    }

    /// The tokens, of the authority with this fingerprint: what another one's says is of no use.
    pub(super) fn tokens(&self, authority: [u8; 32]) -> MutexGuard<'_, Tokens> {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.set_authority(authority);
        tokens
    }

    pub(super) fn check_host(&self, host: &str) -> Result<(), ApiError> {
        if self.hosts.iter().any(|known| known == host) {
            return Ok(());
        }
        let known = self.hosts.join(", ");
        Err(problem(
            "unknown_host",
            format!("the rack has no host {host}"),
            &format!("its hosts are {known}"),
        ))
    }
}

fn sign(
    bundle: &AuthorityBundle,
    certified: &Certified,
    request: &str,
) -> Result<(KeyedCertificate, Certificates), ApiError> {
    let refused = |error: AuthorityError| {
        let remedy = "join with `rackbus node --join`, or log in with `rackbus login`";
        problem("bad_request", error.to_string(), remedy)
    };
    let certificates = bundle.sign(certified, request).map_err(refused)?;
    let key = KeyedCertificate::of_pem(&certificates).map_err(refused)?.key;
    let given = KeyedCertificate { certified: certified.clone(), key };
    Ok((given, Certificates { certificates }))
}

/// Lets hosts and people in: what they are let in by, and where that is noted.
#[derive(Debug)]
pub(crate) struct RackAdmission {
    pub(super) joining: Arc<Joining>,
    pub(super) service: Arc<Service>,
}

impl RackAdmission {
    pub(crate) fn check_host(&self, host: &str) -> Result<(), ApiError> {
        self.joining.check_host(host)
    }

    /// What the rack has where it has never replaced its certificate authority.
    pub(crate) fn first_authority(&self) -> &AuthoritySet {
        self.joining.authorities.first()
    }

    pub(crate) fn control_planes(&self) -> Option<&ControlPlanesSource> {
        self.joining.control_planes.as_ref()
    }

    /// What signs and is trusted where the rack has these authorities.
    pub(crate) fn bundle(
        &self,
        set: Option<&AuthoritySet>,
    ) -> Result<Arc<AuthorityBundle>, ApiError> {
        self.joining.authorities.bundle(set).map_err(|error| {
            problem("not_stored", error.to_string(), "see to the store: an authority is damaged")
        })
    }

    /// What signs and is trusted now, and by which numbers.
    pub(crate) fn authorities(&self) -> Result<(Arc<AuthorityBundle>, AuthorityNumbers), ApiError> {
        let set = self.service.register().authorities().cloned();
        let numbers = set.as_ref().map(AuthoritySet::numbers).unwrap_or_default();
        Ok((self.bundle(set.as_ref())?, numbers))
    }

    fn authority(&self) -> Result<[u8; 32], ApiError> {
        Ok(self.authorities()?.0.fingerprint())
    }

    /// Signs a certificate and notes that it is given out; again where the authorities change meanwhile.
    async fn issue(
        &self,
        certified: &Certified,
        request: &str,
        old: Option<&KeyedCertificate>,
    ) -> Result<Certificates, ApiError> {
        loop {
            let (bundle, under) = self.authorities()?;
            // What cannot be signed costs nothing.
            let (given, signed) = sign(&bundle, certified, request)?;
            match self.service.issue_certificate(given, under, old.cloned()).await {
                Err(again) if again.code == OTHER_AUTHORITIES => {}
                Err(refused) => return Err(refused),
                Ok(()) => return Ok(signed),
            }
        }
    }

    /// Notes who was let in.
    pub(crate) async fn note(&self, event: Draft) {
        self.service.note(event).await;
    }

    /// A token for `bearer`, which is good for so long.
    pub(crate) async fn make_token(
        &self,
        bearer: Bearer,
        time: Duration,
        key: Option<String>,
    ) -> Result<NewToken, ApiError> {
        let (joining, authority) = (self.joining.clone(), self.authority()?);
        let made = blocking(move || joining.tokens(authority).make(&bearer, time, key.as_deref()));
        let stored = |error: std::io::Error| {
            problem("not_stored", error.to_string(), "see to the state directory")
        };
        Ok(NewToken { token: made.await.map_err(stored)?.to_string(), life_seconds: None })
    }

    /// Certificates for who has `token`, which is used up by that. `subject` says of whom they are, and for how long.
    pub(crate) async fn admit(
        &self,
        token: Token,
        request: String,
        remedy: &'static str,
        subject: impl Fn(&Bearer) -> Result<(Subject, Duration), ApiError> + Send + 'static,
    ) -> Result<(Subject, Certificates), ApiError> {
        let refused = move |error: TokenRefused| match error {
            // It may have been stored all the same: the same request is answered by the same certificate then.
            TokenRefused::Store(_) => problem("ending", error.to_string(), "try again in a moment"),
            _ => problem("forbidden", error.to_string(), remedy),
        };
        let (joining, shown, asked) = (self.joining.clone(), token.clone(), request.clone());
        let authority = self.authority()?;
        // Who has no token learns nothing.
        let found = blocking(move || {
            let mut tokens = joining.tokens(authority);
            Ok((tokens.bearer(&shown, &asked)?, tokens.certified(&shown, &asked)?))
        });
        let (bearer, before) = found.await.map_err(refused)?;
        let (subject, life) = subject(&bearer)?;
        if let Some(certified) = before {
            let revoked = self.service.revocations().check(&certified);
            revoked.map_err(|error| problem("forbidden", error.to_string(), remedy))?;
            // By the authorities that there are now, which is noted.
            return Ok((subject, self.issue(&certified, &request, None).await?));
        }
        let certified = self.service.draft_certificate(subject.clone(), life);
        let signed = self.issue(&certified, &request, None).await?;
        let joining = self.joining.clone();
        let (asked, drafted) = (request.clone(), certified.clone());
        let take = move || joining.tokens(authority).take(&token, &bearer, (&asked, &drafted));
        // Of several other requests with it at once, one gets its certificate; the same one at once gets the first one's.
        let given = blocking(take).await.map_err(refused)?;
        let signed = match given == certified {
            true => signed,
            false => self.issue(&given, &request, None).await?,
        };
        Ok((subject, signed))
    }

    /// Gives out a certificate; one that is renewed goes with the one that it is renewed by.
    pub(super) async fn give(
        &self,
        subject: Subject,
        life: Duration,
        request: &str,
        old: Option<KeyedCertificate>,
    ) -> Result<Certificates, ApiError> {
        let certified = self.service.draft_certificate(subject, life);
        self.issue(&certified, request, old.as_ref()).await
    }

    /// Forgets the tokens of who is revoked; how many there were.
    pub(crate) async fn forget_tokens(&self, what: Revoked) -> Result<usize, ApiError> {
        let of = move |bearer: &Bearer| match (bearer, &what) {
            (Bearer::Host(host, _), Revoked::Host(revoked)) => host == revoked,
            (Bearer::Person(person, _), Revoked::User(revoked)) => person.user == *revoked,
            _ => false,
        };
        let (joining, authority) = (self.joining.clone(), self.authority()?);
        let forgotten = blocking(move || joining.tokens(authority).forget(of)).await;
        forgotten.map_err(|error| {
            problem("not_stored", error.to_string(), "nothing was revoked; see to the store")
        })
    }

    pub(crate) fn service(&self) -> &Service {
        &self.service
    }
}
