//! What the control planes of a rack share beside its state: whose the keys are, the rack's certificate authority,
//! and the tokens that hosts join with.
//!
//! The authority's private key is in etcd as it is: who reads the rack's keys there can be anybody in the rack. So
//! members on other machines are spoken to by TLS only, and etcd is to be set up to let nobody else in.

use std::io;
use std::sync::Arc;

use rackbus_identity::{AuthorityError, CertificateAuthority, Shelf};
use serde::{Deserialize, Serialize};

use super::tenure::Tenure;
use crate::etcd::{Compare, EtcdClient, EtcdOperation, Kv, KvError, Revision, Txn};
use crate::store::{ETCD_LAYOUT, FIRST_ETCD_LAYOUT, Keys};

/// Why a cluster's keys are not this rack's.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// etcd does not answer, or refuses.
    #[error(transparent)]
    Etcd(#[from] KvError),
    /// The prefix is another rack's.
    #[error("the keys under {prefix} are those of rack {found}; name another --etcd-prefix")]
    OtherRack {
        /// Where in etcd the keys are, as `--etcd-prefix` says.
        prefix: String,
        /// The rack whose keys are there.
        found: String,
    },
    /// A newer version wrote them.
    #[error(
        "the keys under {prefix} were written by a newer version of rackbus (layout {found}); run that version"
    )]
    Newer {
        /// Where in etcd the keys are, as `--etcd-prefix` says.
        prefix: String,
        /// The layout that they have.
        found: u64,
    },
    /// The state directory has the authority of another rack, or of an earlier life of this one.
    #[error(
        "the certificate authority in the state directory is not the one under {prefix} in etcd: this is another \
         rack's etcd, or another rack's state directory"
    )]
    OtherAuthority {
        /// Where in etcd the keys are, as `--etcd-prefix` says.
        prefix: String,
    },
    /// The state was moved to another store.
    #[error(
        "the state under {prefix} has moved to {to}; start with that, or move it back with `rackbus control migrate`"
    )]
    Moved {
        /// Where in etcd the keys were, as `--etcd-prefix` says.
        prefix: String,
        /// The store that has the state now.
        to: String,
    },
    /// A state that was to be put there is there in part only.
    #[error(
        "the state under {prefix} was not put there completely; run `rackbus control restore` or `migrate` again"
    )]
    Incomplete {
        /// Where in etcd the keys are, as `--etcd-prefix` says.
        prefix: String,
    },
    /// The authority cannot be made or read.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// What was found makes no sense.
    #[error("{0} cannot be read: {1}")]
    Value(String, serde_json::Error),
}

#[derive(Debug, Serialize, Deserialize)]
struct Whose {
    rack: String,
    layout: u64,
}

/// The rack's authority as it is kept.
#[derive(Serialize, Deserialize)]
struct KeptAuthority {
    certificate: String,
    key: String,
}

/// What is under `identity` for this authority.
pub fn identity_value(authority: &CertificateAuthority) -> String {
    let (certificate, key) = authority.pem();
    let kept = KeptAuthority { certificate: certificate.to_owned(), key };
    serde_json::to_string(&kept).unwrap_or_default()
}

/// The authority that is under `identity`.
///
/// # Errors
/// [`SharedError`].
pub fn identity_of(value: &str) -> Result<CertificateAuthority, SharedError> {
    let kept: KeptAuthority = serde_json::from_str(value)
        .map_err(|cause| SharedError::Value("identity".into(), cause))?;
    Ok(CertificateAuthority::from_pem(&kept.certificate, &kept.key)?)
}

/// The rack that is named under `rack`.
///
/// # Errors
/// [`SharedError`].
pub fn rack_of(value: &str) -> Result<String, SharedError> {
    let whose: Whose =
        serde_json::from_str(value).map_err(|cause| SharedError::Value("rack".into(), cause))?;
    match whose.layout <= ETCD_LAYOUT {
        true => Ok(whose.rack),
        false => Err(SharedError::Newer { prefix: whose.rack, found: whose.layout }),
    }
}

/// What is under `rack` for the rack of this name, whose keys have this layout.
pub fn rack_value(rack: &str, layout: u64) -> String {
    let whose = Whose { rack: rack.to_owned(), layout };
    serde_json::to_string(&whose).unwrap_or_default()
}

/// The authority of `rack`, which the first of its control planes puts there: the one it has (`own`), or a new one.
///
/// # Errors
/// [`SharedError`], among them all that says that these keys are not this rack's.
pub async fn authority(
    etcd: &mut EtcdClient,
    keys: &Keys,
    rack: &str,
    own: Option<&CertificateAuthority>,
) -> Result<CertificateAuthority, SharedError> {
    let names = ["rack", "identity", "moved", "incomplete"].map(|name| keys.key(name));
    loop {
        let then = names.iter().cloned().map(EtcdOperation::Get).collect();
        let done = etcd.txn(&Txn { then, ..Txn::default() }).await?;
        let [whose, identity, moved, incomplete] = &done.found[..] else {
            return Err(KvError::Unknown("its answer makes no sense".to_owned()).into());
        };
        let prefix = keys.key("");
        if let Some(whose) = whose {
            let whose: Whose = serde_json::from_str(&whose.value)
                .map_err(|cause| SharedError::Value("rack".into(), cause))?;
            if whose.rack != rack {
                return Err(SharedError::OtherRack { prefix, found: whose.rack });
            }
            if whose.layout > ETCD_LAYOUT {
                return Err(SharedError::Newer { prefix, found: whose.layout });
            }
        }
        if let Some(moved) = moved {
            return Err(SharedError::Moved { prefix, to: moved.value.clone() });
        }
        if incomplete.is_some() {
            return Err(SharedError::Incomplete { prefix });
        }
        if let Some(identity) = identity {
            let shared = identity_of(&identity.value)?;
            return match own.is_none_or(|own| own.fingerprint() == shared.fingerprint()) {
                true => Ok(shared),
                false => Err(SharedError::OtherAuthority { prefix }),
            };
        }
        let made = if own.is_none() { Some(CertificateAuthority::generate(rack)?) } else { None };
        let Some(first) = own.or(made.as_ref()) else { continue };
        let [whose, identity, ..] = names.clone();
        let begin = Txn {
            compares: vec![
                Compare::Created(whose.clone(), 0),
                Compare::Created(identity.clone(), 0),
            ],
            then: vec![
                EtcdOperation::put(whose, rack_value(rack, FIRST_ETCD_LAYOUT)),
                EtcdOperation::put(identity, identity_value(first)),
            ],
            otherwise: Vec::new(),
        };
        // Whoever was first: it is read again.
        etcd.txn(&begin).await?;
    }
}

/// Tokens in etcd: only the leader changes them.
#[derive(Debug)]
pub struct SharedShelf {
    kv: Box<dyn Kv>,
    keys: Keys,
    tenure: Arc<Tenure>,
    read: Revision,
}

impl SharedShelf {
    /// Of who leads by `tenure`.
    pub fn new(kv: Box<dyn Kv>, keys: Keys, tenure: Arc<Tenure>) -> SharedShelf {
        SharedShelf { kv, keys, tenure, read: 0 }
    }
}

impl Shelf for SharedShelf {
    fn read(&mut self) -> io::Result<Option<String>> {
        let look =
            Txn { then: vec![EtcdOperation::Get(self.keys.key("tokens"))], ..Txn::default() };
        let found =
            self.kv.txn(&look).map_err(io::Error::other)?.found.into_iter().next().flatten();
        self.read = found.as_ref().map_or(0, |it| it.modified);
        Ok(found.map(|it| it.value))
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let tokens = self.keys.key("tokens");
        let put = Txn {
            compares: vec![
                Compare::Created(self.keys.key("leader"), self.tenure.revision),
                Compare::Modified(tokens.clone(), self.read),
            ],
            then: vec![EtcdOperation::put(tokens, text)],
            otherwise: Vec::new(),
        };
        match self.kv.txn(&put).map_err(io::Error::other)?.succeeded {
            true => Ok(()),
            false => Err(io::Error::other("this control plane is no longer the leader")),
        }
    }
}
