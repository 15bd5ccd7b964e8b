//! What lets a host join once: a secret, and the fingerprint by which the host knows the rack's authority.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::credentials::write_private;
use crate::{hex, of_hex, random};

/// What a host joins with: `rackbus1.SECRET.AUTHORITY`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: [u8; 16],
    authority: [u8; 32],
}

/// A text is no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this is no token to join with: these begin with `rackbus1.`, and are made by `rackbus token`"
)]
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
    /// It is for another host.
    #[error("the token is for host {0}")]
    Host(String),
    /// That it was used cannot be stored.
    #[error("tokens cannot be stored: {0}")]
    Store(io::Error),
}

/// A token that may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Open {
    /// The only host that may use it.
    host: String,
    /// Seconds since 1970 until which it is good.
    until: u64,
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

    /// A new one, with which `host` may join once within `time`.
    ///
    /// # Errors
    /// When it cannot be stored, or there are too many.
    pub fn make(&mut self, host: &str, time: Duration) -> io::Result<Token> {
        let now = now();
        let mut all = self.all()?;
        all.retain(|_, open| open.until > now);
        if all.len() >= MOST {
            return Err(io::Error::other("too many tokens wait to be used"));
        }
        let token = Token { secret: random(), authority: self.authority };
        let until = now.saturating_add(time.as_secs());
        all.insert(token.digest(), Open { host: host.to_owned(), until });
        self.store(&all)?;
        Ok(token)
    }

    /// Whether `host` may join with `token`.
    ///
    /// # Errors
    /// [`TokenRefused`].
    pub fn check(&mut self, token: &Token, host: &str) -> Result<(), TokenRefused> {
        let all = self.all().map_err(TokenRefused::Store)?;
        self.find(&all, token, host).map(drop)
    }

    fn find(&self, all: &AllOpen, token: &Token, host: &str) -> Result<String, TokenRefused> {
        let (digest, now) = (token.digest(), now());
        let open = all.get(&digest).filter(|open| open.until > now);
        let open = open.filter(|_| token.authority == self.authority);
        let open = open.ok_or(TokenRefused::Unknown)?;
        if open.host != host {
            return Err(TokenRefused::Host(open.host.clone()));
        }
        Ok(digest)
    }

    /// `host` joins with `token`, which is of no more use then.
    ///
    /// # Errors
    /// [`TokenRefused`]. The token of another host stays good.
    pub fn take(&mut self, token: &Token, host: &str) -> Result<(), TokenRefused> {
        let mut all = self.all().map_err(TokenRefused::Store)?;
        let digest = self.find(&all, token, host)?;
        all.remove(&digest);
        self.store(&all).map_err(TokenRefused::Store)
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

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_token_is_good_once_and_for_one_host() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let token = tokens.make("alpha", HOUR).unwrap();
        let text = token.to_string();
        assert_eq!(text.parse::<Token>().unwrap(), token);
        assert!(
            matches!(tokens.take(&token, "beta"), Err(TokenRefused::Host(host)) if host == "alpha")
        );
        // Another process of the control plane knows it, too.
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        tokens.take(&token, "alpha").unwrap();
        for mut tokens in [tokens, Tokens::open(folder.path(), [7; 32]).unwrap()] {
            assert!(matches!(tokens.take(&token, "alpha"), Err(TokenRefused::Unknown)));
        }
        let stored = std::fs::read_to_string(folder.path().join("tokens.json")).unwrap();
        assert!(!stored.contains(text.split('.').nth(1).unwrap()), "the secret is in a file");
        assert!(!format!("{token:?}").contains(text.split('.').nth(1).unwrap()));
    }

    #[test]
    fn a_token_that_has_expired_or_is_another_racks_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut tokens = Tokens::open(folder.path(), [7; 32]).unwrap();
        let expired = tokens.make("alpha", Duration::ZERO).unwrap();
        assert!(matches!(tokens.take(&expired, "alpha"), Err(TokenRefused::Unknown)));
        let good = tokens.make("alpha", HOUR).unwrap();
        let other = Token { authority: [8; 32], ..good };
        assert!(matches!(tokens.take(&other, "alpha"), Err(TokenRefused::Unknown)));
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
