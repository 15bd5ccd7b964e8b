//! The certificate authorities of a rack whose first one was replaced: each of its control planes reads them from the store, as
//! one that does not lead is told by nobody.

use std::time::Duration;

use tokio::sync::watch;

use super::shared::SharedError;
use crate::etcd::{EtcdClient, EtcdOperation, Txn};
use crate::register::{AUTHORITIES, AuthoritySet, RegisterEntry};
use crate::store::Keys;

/// How long a control plane waits before it reads them again.
const LOOK: Duration = Duration::from_secs(1);

/// The authorities that are stored; nothing where the rack has its first one alone.
///
/// # Errors
/// [`SharedError`].
pub async fn read(etcd: &mut EtcdClient, keys: &Keys) -> Result<Option<AuthoritySet>, SharedError> {
    let key = keys.key(&format!("certificate/{AUTHORITIES}"));
    let look = Txn { then: vec![EtcdOperation::Get(key.clone())], ..Txn::default() };
    let found = etcd.txn(&look).await?.found.into_iter().next().flatten();
    let Some(found) = found else { return Ok(None) };
    let entry: RegisterEntry =
        serde_json::from_str(&found.value).map_err(|cause| SharedError::Value(key, cause))?;
    match entry {
        RegisterEntry::Authorities(set) => Ok(Some(*set)),
        RegisterEntry::Issued(_) | RegisterEntry::Revoked(_) => Ok(None),
    }
}

/// Tells of a set that is later than the one that is known: what was read before may be told after it.
pub fn tell(known: &watch::Sender<Option<AuthoritySet>>, set: Option<AuthoritySet>) {
    known.send_if_modified(|known| {
        let is_later = AuthoritySet::step_of(set.as_ref()) > AuthoritySet::step_of(known.as_ref());
        if is_later {
            *known = set;
        }
        is_later
    });
}

/// Reads them again and again, until nobody listens.
pub async fn follow(mut etcd: EtcdClient, keys: Keys, known: watch::Sender<Option<AuthoritySet>>) {
    let mut is_read = true;
    while !known.is_closed() {
        match read(&mut etcd, &keys).await {
            Ok(set) => {
                is_read = true;
                tell(&known, set);
            }
            // Once: that etcd does not answer is said elsewhere, too.
            Err(error) => {
                if std::mem::take(&mut is_read) {
                    tracing::warn!(%error, "the rack's certificate authorities are not read");
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}
