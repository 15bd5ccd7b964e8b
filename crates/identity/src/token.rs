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

use crate::certified::{PERSON_LIFE, now};
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
    /// The machine of this host, to join.
    Host(String),
    /// This person, to log in; their certificates are good for so long.
    Person(Person, Duration),
}

impl fmt::Display for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bearer::Host(host) => write!(f, "host {host}"),
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
    /// For how many seconds the person's certificates are good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    life: Option<u64>,
    /// Seconds since 1970 until which it is good.
    until: u64,
}

impl Open {
    fn new(bearer: &Bearer, until: u64) -> Open {
        match bearer {
            Bearer::Host(host) => Open { host: host.clone(), person: None, life: None, until },
            Bearer::Person(person, life) => Open {
                host: String::new(),
                person: Some(Subject::Person(person.clone())),
                life: Some(life.as_secs()),
                until,
            },
        }
    }

    fn bearer(&self) -> Bearer {
        match &self.person {
            Some(Subject::Person(person)) => {
                let life = self.life.map_or(PERSON_LIFE, Duration::from_secs);
                Bearer::Person(person.clone(), life)
            }
            _ => Bearer::Host(self.host.clone()),
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

/// Tokens that may be open at a time.
const MOST: usize = 5_000;

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

    /// A new one, which `bearer` may use once within `time`.
    ///
    /// # Errors
    /// When it cannot be stored, or there are too many.
    pub fn make(&mut self, bearer: &Bearer, time: Duration) -> io::Result<Token> {
        let now = now();
        let mut all = self.all()?;
        all.retain(|_, open| open.until > now);
        if all.len() >= MOST {
            return Err(io::Error::other("too many tokens wait to be used"));
        }
        let token = Token { secret: random(), authority: self.authority };
        let until = now.saturating_add(time.as_secs());
        all.insert(token.digest(), Open::new(bearer, until));
        self.store(&all)?;
        Ok(token)
    }

    /// Who may use `token`.
    ///
    /// # Errors
    /// [`TokenRefused`].
    pub fn bearer(&mut self, token: &Token) -> Result<Bearer, TokenRefused> {
        let all = self.all().map_err(TokenRefused::Store)?;
        self.find(&all, token).map(|(_, bearer)| bearer)
    }

    fn find(&self, all: &AllOpen, token: &Token) -> Result<(String, Bearer), TokenRefused> {
        let (digest, now) = (token.digest(), now());
        let open = all.get(&digest).filter(|open| open.until > now);
        let open = open.filter(|_| token.authority == self.authority);
        let bearer = open.ok_or(TokenRefused::Unknown)?.bearer();
        Ok((digest, bearer))
    }

    /// `bearer` uses `token`, which is of no more use then.
    ///
    /// # Errors
    /// [`TokenRefused`]. The token of somebody else stays good.
    pub fn take(&mut self, token: &Token, bearer: &Bearer) -> Result<(), TokenRefused> {
        let mut all = self.all().map_err(TokenRefused::Store)?;
        let (digest, owner) = self.find(&all, token)?;
        if owner != *bearer {
            return Err(TokenRefused::Other(owner));
        }
        all.remove(&digest);
        self.store(&all).map_err(TokenRefused::Store)
    }

    /// Forgets the tokens of those whom `of` says; how many there were.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub fn forget(&mut self, of: impl Fn(&Bearer) -> bool) -> io::Result<usize> {
        let mut all = self.all()?;
        let before = all.len();
        all.retain(|_, open| !of(&open.bearer()));
        let gone = before - all.len();
        if gone > 0 {
            self.store(&all)?;
        }
        Ok(gone)
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
        Bearer::Host(name.to_owned())
    }

    #[test]
    fn a_token_is_good_once_and_for_one_host() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let token = tokens.make(&host("alpha"), HOUR).unwrap();
        let text = token.to_string();
        assert_eq!(text.parse::<Token>().unwrap(), token);
        assert_eq!(tokens.bearer(&token).unwrap(), host("alpha"));
        let refused = tokens.take(&token, &host("beta")).unwrap_err();
        assert_eq!(refused.to_string(), "the token is for host alpha");
        // Another process of the control plane knows it, too.
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        tokens.take(&token, &host("alpha")).unwrap();
        for mut tokens in [tokens, Tokens::open(folder.path(), [7; 32]).unwrap()] {
            let refused = tokens.take(&token, &host("alpha"));
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
        let token = tokens.make(&ann, HOUR).unwrap();
        assert_eq!(tokens.bearer(&token).unwrap(), ann);
        // No host joins with it: neither beta, for which ann borrows, nor one without a name.
        for other in [host("beta"), host("ann"), host("")] {
            let refused = tokens.take(&token, &other).unwrap_err();
            assert_eq!(refused.to_string(), "the token is for user ann");
        }
        tokens.take(&token, &ann).unwrap();
        assert!(matches!(tokens.bearer(&token), Err(TokenRefused::Unknown)));
    }

    #[test]
    fn a_token_that_has_expired_or_is_another_racks_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let expired = tokens.make(&host("alpha"), Duration::ZERO).unwrap();
        assert!(matches!(tokens.take(&expired, &host("alpha")), Err(TokenRefused::Unknown)));
        let good = tokens.make(&host("alpha"), HOUR).unwrap();
        let other = Token { authority: [8; 32], ..good };
        assert!(matches!(tokens.take(&other, &host("alpha")), Err(TokenRefused::Unknown)));
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
