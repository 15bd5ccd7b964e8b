//! etcd, as far as the control plane uses it: transactions, reads, leases.
//!
//! * [`Txn`] and what it answers; [`Kv`] is whoever carries them out, for the store's thread.
//! * [`gateway`]: the official JSON gateway of a cluster, over HTTP or TLS.
//! * [`model`]: a cluster in memory, for simulations.
//!
//! A transaction whose answer is lost may have been carried out ([`KvError::Unknown`]); who asks has to find out.

pub mod gateway;
mod json;
pub mod model;

pub use gateway::{Blocking, Cluster, ClusterError, EtcdClient, EtcdEndpoint};

/// A revision of etcd's store. Grows with each change.
pub type Revision = i64;
/// Number of a lease of etcd's.
pub type EtcdLease = i64;

/// Operations that etcd takes in one transaction, unless its `--max-txn-ops` says otherwise.
const MOST_OPERATIONS: usize = 128;
/// Operations of a transaction whose operations are transactions: all of them are carried out as one.
const NESTED: usize = MOST_OPERATIONS / 2;
/// Bytes of keys and values that are sent in one transaction; etcd takes 1.5 MiB with all that is around them.
const MOST_BYTES: usize = 1 << 20;

/// What has to be so for a transaction to be carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    /// The key was made by this revision; 0: it is not there.
    Created(String, Revision),
    /// The key was changed last by this revision; 0: it is not there.
    Modified(String, Revision),
}

/// One operation of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EtcdOperation {
    /// Sets a key's value; with a lease, the key goes with it.
    Put {
        /// The whole key, with the prefix of its rack.
        key: String,
        /// The value that the key has from then on.
        value: String,
        /// The lease that it is bound to.
        lease: Option<EtcdLease>,
    },
    /// Removes this key; nothing happens where there is none.
    Delete(String),
    /// Removes all keys from the first up to, and without, the second.
    DeleteRange(String, String),
    /// Reads this key; the answer is its value and revisions, or that there is none.
    Get(String),
}

impl EtcdOperation {
    /// Sets a key that is bound to no lease.
    pub fn put(key: impl Into<String>, value: impl Into<String>) -> EtcdOperation {
        EtcdOperation::Put { key: key.into(), value: value.into(), lease: None }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            EtcdOperation::Put { key, value, .. } => key.len() + value.len(),
            EtcdOperation::Delete(key) | EtcdOperation::Get(key) => key.len(),
            EtcdOperation::DeleteRange(from, to) => from.len() + to.len(),
        }
    }
}

/// A transaction: if all comparisons hold, the first operations are carried out, else the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    /// What has to be so.
    pub compares: Vec<Compare>,
    /// What is done then.
    pub then: Vec<EtcdOperation>,
    /// What is done otherwise.
    pub otherwise: Vec<EtcdOperation>,
}

impl Txn {
    /// Whether etcd, as it is set up when nobody says otherwise, takes it.
    ///
    /// # Errors
    /// Why not.
    pub fn check_size(&self) -> Result<(), String> {
        let operations = self.then.len().max(self.otherwise.len());
        let bytes: usize = self.then.iter().chain(&self.otherwise).map(EtcdOperation::bytes).sum();
        let most = NESTED * NESTED;
        match operations <= most && bytes <= MOST_BYTES {
            true => Ok(()),
            false => Err(format!(
                "it changes {operations} values with {bytes} bytes; etcd takes {most} with {MOST_BYTES} at once"
            )),
        }
    }
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The whole key, with the prefix of its rack.
    pub key: String,
    /// The key's value at the revision of the answer.
    pub value: String,
    /// The revision that made it.
    pub created: Revision,
    /// The revision that changed it last.
    pub modified: Revision,
    /// The lease that it is bound to; 0 for none.
    pub lease: EtcdLease,
}

/// What a transaction came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransactionResult {
    /// Whether the comparisons held.
    pub succeeded: bool,
    /// The store's revision after it.
    pub revision: Revision,
    /// What the [reads](EtcdOperation::Get) found, in their order.
    pub found: Vec<Option<KeyValue>>,
}

/// A part of the keys, as they were at one revision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyPage {
    /// In the order of the keys.
    pub values: Vec<KeyValue>,
    /// The revision that was read.
    pub revision: Revision,
    /// Whether there are more after these.
    pub more: bool,
}

/// Which keys are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key of the range, included.
    pub from: String,
    /// The key after the last.
    pub to: String,
    /// As they were then; 0 for now.
    pub revision: Revision,
    /// At most so many.
    pub limit: usize,
}

impl KeyRange {
    /// All keys that begin with `prefix`, now.
    pub fn of(prefix: &str) -> KeyRange {
        KeyRange { from: prefix.to_owned(), to: after(prefix), revision: 0, limit: 500 }
    }
}

/// The first key after all that begin with `prefix`.
pub fn after(prefix: &str) -> String {
    let mut bytes = prefix.as_bytes().to_vec();
    // Keys are printable ASCII: the last byte can be counted up.
    if let Some(last) = bytes.last_mut() {
        *last += 1;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Why etcd did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// It says no: nothing was changed.
    #[error("etcd refuses: {0}")]
    Refused(String),
    /// What was asked for is not there (any more).
    #[error("etcd does not have what was asked for: {0}")]
    Gone(String),
    /// No member can be reached: nothing was sent.
    #[error("etcd cannot be reached: {0}")]
    Unreachable(String),
    /// Every member shows a certificate that is refused: nothing was sent, and waiting is of no use.
    #[error("etcd is not the one that is meant: {0}")]
    NotTrusted(String),
    /// The answer was lost, or is none: it may have been done.
    #[error("etcd does not answer: {0}")]
    Unknown(String),
}

/// Carries out transactions and reads, and waits for their answers: for a thread that may wait.
pub trait Kv: Send + std::fmt::Debug {
    /// Carries out a transaction.
    ///
    /// # Errors
    /// [`KvError`].
    fn txn(&mut self, txn: &Txn) -> Result<TransactionResult, KvError>;

    /// Reads keys, as the whole cluster has them.
    ///
    /// # Errors
    /// [`KvError`].
    fn range(&mut self, range: &KeyRange) -> Result<KeyPage, KvError>;

    /// Waits some moments before something that failed is tried again.
    fn pause(&mut self);
}

/// All keys that begin with `prefix`, as they were at one revision (0 for now); and that revision.
///
/// # Errors
/// [`KvError`].
pub fn read_all(
    kv: &mut dyn Kv,
    prefix: &str,
    revision: Revision,
) -> Result<(Vec<KeyValue>, Revision), KvError> {
    let mut range = KeyRange { revision, ..KeyRange::of(prefix) };
    let mut values = Vec::new();
    loop {
        let page = kv.range(&range)?;
        if range.revision == 0 {
            range.revision = page.revision;
        }
        values.extend(page.values);
        match values.last() {
            Some(last) if page.more => range.from = format!("{}\0", last.key),
            _ => return Ok((values, range.revision)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_next_name() {
        assert_eq!(after("/rackbus/demo/"), "/rackbus/demo0");
        assert!(*"/rackbus/demo/zz" < *after("/rackbus/demo/"));
    }

    #[test]
    fn what_etcd_does_not_take_at_once_is_known_before() {
        let put = |n: usize| EtcdOperation::put(format!("k{n}"), "v".repeat(100));
        let mut txn = Txn { then: (0..4096).map(put).collect(), ..Txn::default() };
        assert_eq!(txn.check_size(), Ok(()));
        txn.then.push(put(4096));
        assert!(txn.check_size().unwrap_err().contains("4097 values"));
        let txn =
            Txn { then: vec![EtcdOperation::put("k", "v".repeat(2 << 20))], ..Txn::default() };
        assert!(txn.check_size().is_err());
    }
}
