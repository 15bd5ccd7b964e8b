//! What lets a host join, or a person log in, once: a secret, and the fingerprint by which they know the rack's
//! authority.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::certified::{Certified, NODE_LIFE, PERSON_LIFE, now};
use crate::credentials::write_private;
use crate::{Person, Subject, hex, of_hex, random};

/// What a host joins or a person logs in with: `rackbus1.SECRET.AUTHORITY`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: [u8; 16],
    authority: [u8; 32],
}

/// A text is no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this is no token: these begin with `rackbus1.`, and are made by `rackbus token`")]
pub struct BadToken;

impl Token {
    /// The fingerprint of the authority that made it.
    pub fn authority(&self) -> &[u8; 32] {
        &self.authority
    }

    /// What the control plane is told: not the secret, by which others could join.
    fn digest(&self) -> String {
        hex(&sha2::Sha256::digest(self.secret))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rackbus1.{}.{}", hex(&self.secret), hex(&self.authority))
    }
}

/// Without the secret, so that none is ever in a log.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").finish_non_exhaustive()
    }
}

impl FromStr for Token {
    type Err = BadToken;

    fn from_str(text: &str) -> Result<Token, BadToken> {
        let mut parts = text.trim().split('.');
        let parts = [parts.next(), parts.next(), parts.next(), parts.next()];
        let [Some("rackbus1"), Some(secret), Some(authority), None] = parts else {
            return Err(BadToken);
        };
        let secret = of_hex(secret).ok_or(BadToken)?;
        Ok(Token { secret, authority: of_hex(authority).ok_or(BadToken)? })
    }
}

/// Why a token lets nobody join.
#[derive(Debug, thiserror::Error)]
pub enum TokenRefused {
    /// It was used, has expired, or was never made here.
    #[error(
        "the token was used already, has expired, or is another rack's; make a new one with `rackbus token`"
    )]
    Unknown,
    /// It is for another host, or for somebody else.
    #[error("the token is for {0}")]
    Other(Bearer),
    /// That it was used cannot be stored.
    #[error("tokens cannot be stored: {0}")]
    Store(io::Error),
}

/// Who may use a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bearer {
    /// The machine of this host, to join; its certificates are good for so long.
    Host(String, Duration),
    /// This person, to log in; their certificates are good for so long.
    Person(Person, Duration),
}

impl fmt::Display for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bearer::Host(host, _) => write!(f, "host {host}"),
            Bearer::Person(person, _) => write!(f, "user {}", person.user),
        }
    }
}

/// A token that may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Open {
    /// The only host that may use it; none where it is a person's. Versions that know hosts only read this alone.
    host: String,
    /// The person that may use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    person: Option<Subject>,
    /// For how many seconds the certificates are good; versions before did not say it of hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    life: Option<u64>,
    /// Seconds since 1970 until which it is good.
    until: u64,
    /// Digest of the idempotency key that it was made under, of whom it is for, and for how long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    made_under: Option<String>,
    /// Digest of the request that it was used for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used_for: Option<String>,
    /// The certificate that was given out for that request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    certified: Option<Certified>,
}

/// Where a token is kept that was used, instead of by its digest alone: versions that know nothing of repeated
/// requests do not find it there.
fn used_place(digest: &str) -> String {
    format!("used:{digest}")
}

fn digest_of(text: &str) -> String {
    hex(&sha2::Sha256::digest(text))
}

impl Open {
    fn new(bearer: &Bearer, until: u64) -> Open {
        let (host, person, life) = match bearer {
            Bearer::Host(host, life) => (host.clone(), None, life),
            Bearer::Person(person, life) => {
                (String::new(), Some(Subject::Person(person.clone())), life)
            }
        };
        let life = Some(life.as_secs());
        Open { host, person, life, until, made_under: None, used_for: None, certified: None }
    }

    fn bearer(&self) -> Bearer {
        let life = self.life.map(Duration::from_secs);
        match &self.person {
            Some(Subject::Person(person)) => {
                Bearer::Person(person.clone(), life.unwrap_or(PERSON_LIFE))
            }
            _ => Bearer::Host(self.host.clone(), life.unwrap_or(NODE_LIFE)),
        }
    }
}

/// Where tokens are kept: one text, which several processes may share.
pub trait Shelf: Send + fmt::Debug {
    /// What was put there last; `None` when nothing was.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read(&mut self) -> io::Result<Option<String>>;

    /// Puts this in the place of what was read last; fails where somebody else has put something there since.
    ///
    /// # Errors
    /// When it is not stored, or may not be.
    fn write(&mut self, text: &str) -> io::Result<()>;
}

/// A file that one process writes.
#[derive(Debug)]
struct File(PathBuf);

impl Shelf for File {
    fn read(&mut self) -> io::Result<Option<String>> {
        match std::fs::read_to_string(&self.0) {
            Ok(text) => Ok(Some(text)),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(cause),
        }
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        write_private(&self.0, text)
    }
}

/// The tokens that a rack's control plane has given out and nobody has used.
#[derive(Debug)]
pub struct Tokens {
    shelf: Box<dyn Shelf>,
    authority: [u8; 32],
}

/// Tokens that may be open at a time, and those that were used and are still known.
const MOST: usize = 5_000;
/// How long a token that was used is of use for the same request again, in seconds: that request's answer was lost.
const REPEATED: u64 = 600;

type AllOpen = BTreeMap<String, Open>;

impl Tokens {
    /// Those in `folder`, of the authority with this fingerprint.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn open(folder: &Path, authority: [u8; 32]) -> io::Result<Tokens> {
        let mut tokens = Tokens::on(Box::new(File(folder.join("tokens.json"))), authority);
        tokens.all()?;
        Ok(tokens)
    }

    /// Those that are kept on `shelf`, of the authority with this fingerprint.
    pub fn on(shelf: Box<dyn Shelf>, authority: [u8; 32]) -> Tokens {
        Tokens { shelf, authority }
    }

    /// From now on they are of the authority with this fingerprint. What was made before is of no more use.
    pub fn set_authority(&mut self, authority: [u8; 32]) {
        self.authority = authority;
    }

    /// A new one, which `bearer` may use once within `time`. Where the request for it has an idempotency `key`, one
    /// that was made under the same key for the same is of no more use: its answer was lost.
    ///
    /// # Errors
    /// When it cannot be stored, or there are too many.
    pub fn make(
        &mut self,
        bearer: &Bearer,
        time: Duration,
        key: Option<&str>,
    ) -> io::Result<Token> {
        let now = now();
        let made_under = key.map(|key| digest_of(&format!("{key} {bearer:?} {time:?}")));
        let mut all = self.all()?;
        let is_lost = |open: &Open| {
            open.used_for.is_none() && made_under.is_some() && open.made_under == made_under
        };
        all.retain(|_, open| open.until > now && !is_lost(open));
        if all.values().filter(|open| open.used_for.is_none()).count() >= MOST {
            return Err(io::Error::other("too many tokens wait to be used"));
        }
        let token = Token { secret: random(), authority: self.authority };
        let until = now.saturating_add(time.as_secs());
        all.insert(token.digest(), Open { made_under, ..Open::new(bearer, until) });
        self.store(&all)?;
        Ok(token)
    }

    /// Who may use `token` for a certificate that is asked for by `request`.
    ///
    /// # Errors
    /// [`TokenRefused`].
    pub fn bearer(&mut self, token: &Token, request: &str) -> Result<Bearer, TokenRefused> {
        let all = self.all().map_err(TokenRefused::Store)?;
        self.find(&all, token, request).map(Open::bearer)
    }

    /// The certificate that was given out for `token` and the same `request` before, if one was.
    ///
    /// # Errors
    /// [`TokenRefused`].
    pub fn certified(
        &mut self,
        token: &Token,
        request: &str,
    ) -> Result<Option<Certified>, TokenRefused> {
        let all = self.all().map_err(TokenRefused::Store)?;
        self.find(&all, token, request).map(|open| open.certified.clone())
    }

    fn find<'a>(
        &self,
        all: &'a AllOpen,
        token: &Token,
        request: &str,
    ) -> Result<&'a Open, TokenRefused> {
        let (digest, now) = (token.digest(), now());
        let used = || {
            let used = all.get(&used_place(&digest))?;
            (used.used_for == Some(digest_of(request))).then_some(used)
        };
        let open = all.get(&digest).or_else(used).filter(|open| open.until > now);
        open.filter(|_| token.authority == self.authority).ok_or(TokenRefused::Unknown)
    }

    /// `bearer` uses `token` for a certificate that is asked for by `request`, which is `certified`. For some minutes the
    /// same request is answered by the same certificate again, as the answer may be lost, and no other is from now on.
    /// Returns what the request is certified as: where it was asked twice at once, as who came first.
    ///
    /// # Errors
    /// [`TokenRefused`]. The token of somebody else stays good.
    pub fn take(
        &mut self,
        token: &Token,
        bearer: &Bearer,
        (request, certified): (&str, &Certified),
    ) -> Result<Certified, TokenRefused> {
        let mut all = self.all().map_err(TokenRefused::Store)?;
        let found = self.find(&all, token, request)?;
        let (owner, before) = (found.bearer(), found.certified.clone());
        if owner != *bearer {
            return Err(TokenRefused::Other(owner));
        }
        let (digest, now) = (token.digest(), now());
        let Some(open) = all.remove(&digest) else {
            return Ok(before.unwrap_or_else(|| certified.clone()));
        };
        all.retain(|_, open| open.until > now);
        let used = all.iter().filter(|(_, open)| open.used_for.is_some());
        if used.clone().count() >= MOST
            && let Some((oldest, _)) = used.min_by_key(|(_, open)| open.until)
        {
            let oldest = oldest.clone();
            all.remove(&oldest);
        }
        let until = open.until.min(now.saturating_add(REPEATED));
        let (used_for, given) = (Some(digest_of(request)), Some(certified.clone()));
        let used = Open { until, used_for, certified: given, ..open };
        all.insert(used_place(&digest), used);
        self.store(&all).map_err(TokenRefused::Store)?;
        Ok(certified.clone())
    }

    /// Forgets the tokens of those whom `of` says, also those that were used; how many nobody had used.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub fn forget(&mut self, of: impl Fn(&Bearer) -> bool) -> io::Result<usize> {
        let mut all = self.all()?;
        let (before, mut unused) = (all.len(), 0);
        all.retain(|_, open| {
            let goes = of(&open.bearer());
            unused += usize::from(goes && open.used_for.is_none());
            !goes
        });
        if all.len() < before {
            self.store(&all)?;
        }
        Ok(unused)
    }

    fn all(&mut self) -> io::Result<AllOpen> {
        match self.shelf.read()? {
            Some(text) => Ok(serde_json::from_str(&text)?),
            None => Ok(BTreeMap::new()),
        }
    }

    fn store(&mut self, all: &AllOpen) -> io::Result<()> {
        self.shelf.write(&serde_json::to_string(all)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;

    const HOUR: Duration = Duration::from_secs(3600);

    fn host(name: &str) -> Bearer {
        Bearer::Host(name.to_owned(), HOUR)
    }

    fn certified() -> Certified {
        let serial = "0102030405060708090a0b0c0d0e0f10".parse().unwrap();
        Certified { subject: Subject::Node("alpha".to_owned()), serial, since: 1, until: 2 }
    }

    #[test]
    fn a_token_is_good_once_and_for_one_host() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let token = tokens.make(&host("alpha"), HOUR, None).unwrap();
        let text = token.to_string();
        assert_eq!(text.parse::<Token>().unwrap(), token);
        assert_eq!(tokens.bearer(&token, "a").unwrap(), host("alpha"));
        let refused = tokens.take(&token, &host("beta"), ("a", &certified())).unwrap_err();
        assert_eq!(refused.to_string(), "the token is for host alpha");
        // Another process of the control plane knows it, too.
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        tokens.take(&token, &host("alpha"), ("a", &certified())).unwrap();
        for mut tokens in [tokens, Tokens::open(folder.path(), [7; 32]).unwrap()] {
            let refused = tokens.take(&token, &host("alpha"), ("b", &certified()));
            assert!(matches!(refused, Err(TokenRefused::Unknown)));
        }
        let stored = std::fs::read_to_string(folder.path().join("tokens.json")).unwrap();
        assert!(!stored.contains(text.split('.').nth(1).unwrap()), "the secret is in a file");
        assert!(!format!("{token:?}").contains(text.split('.').nth(1).unwrap()));
    }

    #[test]
    fn a_token_of_a_person_says_who_they_are_and_for_how_long() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let role = Role::Borrower("beta".to_owned());
        let ann = Bearer::Person(Person { user: "ann".to_owned(), role }, HOUR);
        let token = tokens.make(&ann, HOUR, None).unwrap();
        assert_eq!(tokens.bearer(&token, "a").unwrap(), ann);
        // No host joins with it: neither beta, for which ann borrows, nor one without a name.
        for other in [host("beta"), host("ann"), host("")] {
            let refused = tokens.take(&token, &other, ("a", &certified())).unwrap_err();
            assert_eq!(refused.to_string(), "the token is for user ann");
        }
        tokens.take(&token, &ann, ("a", &certified())).unwrap();
        assert!(matches!(tokens.bearer(&token, "b"), Err(TokenRefused::Unknown)));
    }

    #[test]
    fn a_token_that_has_expired_or_is_another_racks_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let expired = tokens.make(&host("alpha"), Duration::ZERO, None).unwrap();
        assert!(matches!(
            tokens.take(&expired, &host("alpha"), ("a", &certified())),
            Err(TokenRefused::Unknown)
        ));
        let good = tokens.make(&host("alpha"), HOUR, None).unwrap();
        let other = Token { authority: [8; 32], ..good };
        assert!(matches!(
            tokens.take(&other, &host("alpha"), ("a", &certified())),
            Err(TokenRefused::Unknown)
        ));
    }

    #[test]
    fn a_hosts_token_that_says_no_life_is_of_an_older_version_and_good_for_the_usual_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let token = tokens.make(&host("alpha"), HOUR, None).unwrap();
        let mut all = tokens.all().unwrap();
        all.values_mut().for_each(|open| open.life = None);
        tokens.store(&all).unwrap();
        let usual = Bearer::Host("alpha".to_owned(), NODE_LIFE);
        assert_eq!(tokens.bearer(&token, "a").unwrap(), usual);
        tokens.take(&token, &usual, ("a", &certified())).unwrap();
    }

    /// The answer to who joined was lost: the same request comes again, and no other is let in.
    #[test]
    fn a_token_that_was_used_is_good_for_the_same_request_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let token = tokens.make(&host("alpha"), HOUR, None).unwrap();
        for round in 0..3u64 {
            assert_eq!(tokens.bearer(&token, "a").unwrap(), host("alpha"));
            let before = (round > 0).then(certified);
            assert_eq!(tokens.certified(&token, "a").unwrap(), before, "one certificate for all");
            // What is asked twice at once is certified twice, of which the first counts.
            let again = Certified { until: certified().until + round, ..certified() };
            let given = tokens.take(&token, &host("alpha"), ("a", &again)).unwrap();
            assert_eq!(given, certified());
            assert!(matches!(tokens.bearer(&token, "b"), Err(TokenRefused::Unknown)));
            assert!(tokens.take(&token, &host("alpha"), ("b", &certified())).is_err());
        }
        let all = tokens.all().unwrap();
        assert!(!all.contains_key(&token.digest()), "an older version lets others in with it");
        assert!(all.values().all(|open| open.until <= now() + REPEATED));
        // Whoever is revoked does not come in again by that, and no token counts that was of no use any more.
        assert_eq!(tokens.forget(|bearer| *bearer == host("alpha")).unwrap(), 0);
        assert!(matches!(tokens.bearer(&token, "a"), Err(TokenRefused::Unknown)));
    }

    #[test]
    fn of_tokens_made_under_one_key_the_last_is_good() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let mut make = |name: &str, key: Option<&str>| tokens.make(&host(name), HOUR, key).unwrap();
        let (lost, last) = (make("alpha", Some("k")), make("alpha", Some("k")));
        let others = [
            make("alpha", Some("l")),
            make("alpha", None),
            make("alpha", None),
            make("beta", Some("k")),
        ];
        assert!(matches!(tokens.bearer(&lost, "a"), Err(TokenRefused::Unknown)));
        assert!(others.iter().chain([&last]).all(|token| tokens.bearer(token, "a").is_ok()));
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let good = Token { secret: [1; 16], authority: [2; 32] }.to_string();
        assert!(good.parse::<Token>().is_ok() && format!(" {good}\n").parse::<Token>().is_ok());
        for bad in
            ["", "rackbus1", "rackbus1..", &good[1..], &good[..good.len() - 1], &format!("{good}.")]
        {
            assert_eq!(bad.parse::<Token>(), Err(BadToken), "{bad}");
        }
    }
}
