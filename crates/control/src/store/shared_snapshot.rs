//! A state as a value, from and into etcd.

use rackbus_identity::CertificateAuthority;

use super::etcd::operations;
use super::snapshot::{FORMAT, Snapshot, SnapshotError};
use super::{FIRST_ETCD_LAYOUT, Keys};
use crate::etcd::{
    Compare, EtcdClient, EtcdLease, EtcdOperation, KeyRange, KeyValue, Revision, Txn,
};
use crate::leadership::election::{self, Member};
use crate::leadership::shared::{SharedError, identity_of, identity_value, rack_of, rack_value};

/// How many seconds others are kept from leading by who puts a state into etcd, after it has died.
const TTL: u64 = 30;
/// Values that are put into etcd at a time, and their bytes.
const BATCH: (usize, usize) = (100, 512 << 10);

impl Snapshot {
    /// The state under `keys`, as it is at one moment; `target` as in [`of_sqlite`](Snapshot::of_sqlite).
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub async fn of_etcd(
        etcd: &mut EtcdClient,
        keys: &Keys,
        target: Option<&str>,
    ) -> Result<Snapshot, SnapshotError> {
        let (mut range, mut all) = (KeyRange::of(&keys.key("")), Vec::new());
        loop {
            let page = etcd.range(&range).await?;
            if range.revision == 0 {
                // All pages are of that moment.
                range.revision = page.revision;
            }
            all.extend(page.values);
            match all.last().filter(|_| page.more) {
                Some(KeyValue { key, .. }) => range.from = format!("{key}\0"),
                None => break,
            }
        }
        let named = |name: &str| {
            let key = keys.key(name);
            all.iter().find(|it| it.key == key).map(|it| it.value.clone())
        };
        let place = keys.key("");
        let rack = named("rack").ok_or_else(|| SnapshotError::Nothing(place.clone()))?;
        if let Some(to) = named("moved").filter(|to| Some(to.as_str()) != target) {
            return Err(SharedError::Moved { prefix: place, to }.into());
        }
        if named("incomplete").is_some() {
            return Err(SharedError::Incomplete { prefix: place }.into());
        }
        let identity = named("identity").map(|it| identity_of(&it)).transpose()?;
        Ok(Snapshot {
            format: FORMAT,
            rack: rack_of(&rack)?,
            term: named("term").and_then(|it| it.parse().ok()).unwrap_or(0),
            records: under(&all, &keys.key("record/"))?,
            answers: under(&all, &keys.key("answer/"))?,
            events: under(&all, &keys.key("event/"))?,
            certificates: under(&all, &keys.key("certificate/"))?,
            identity: identity.map(|it| (it.pem().0.to_owned(), it.pem().1)),
            tokens: named("tokens"),
        })
    }

    /// Whether it may be put under `keys`: nothing is there, or what is there was moved away or never put there
    /// completely, or `replace` says so. The newest term that either of the two has.
    ///
    /// # Errors
    /// [`SnapshotError`], which says why not.
    pub async fn check_etcd(
        &self,
        etcd: &mut EtcdClient,
        keys: &Keys,
        replace: bool,
    ) -> Result<u64, SnapshotError> {
        let names = ["rack", "moved", "incomplete", "term"];
        let then = names.iter().map(|name| EtcdOperation::Get(keys.key(name))).collect();
        let found = etcd.txn(&Txn { then, ..Txn::default() }).await?.found;
        let value = |n: usize| found.get(n).cloned().flatten().map(|it| it.value);
        let place = keys.key("");
        let rack = match value(0).map(|it| rack_of(&it)).transpose() {
            // It names the rack in the prefix's place.
            Err(SharedError::Newer { prefix: rack, .. }) if replace => Some(rack),
            Err(SharedError::Value(..)) if replace => None,
            rack => rack?,
        };
        if let Some(found) = rack {
            if found != self.rack {
                return Err(SnapshotError::OtherRack { place, found, rack: self.rack.clone() });
            }
            let gone = value(1).is_some() || value(2).is_some();
            if !replace && !gone && occupies(etcd, keys).await? {
                return Err(SnapshotError::Occupied(place));
            }
        }
        Ok(value(3).and_then(|it| it.parse().ok()).unwrap_or(0).max(self.term))
    }

    /// Puts it under `keys`, while nobody leads, where that [may be](Snapshot::check_etcd). Whoever is interrupted
    /// leaves a mark, with which no control plane begins.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub async fn put_etcd(
        &self,
        etcd: &mut EtcdClient,
        keys: &Keys,
        replace: bool,
    ) -> Result<(), SnapshotError> {
        let held = LeaderKeyHold::take(etcd, keys).await?;
        let put = self.put_held(etcd, keys, replace, &held).await;
        held.release(etcd).await;
        put
    }

    async fn put_held(
        &self,
        etcd: &mut EtcdClient,
        keys: &Keys,
        replace: bool,
        held: &LeaderKeyHold,
    ) -> Result<(), SnapshotError> {
        let newest = self.check_etcd(etcd, keys, replace).await?;
        let folder = |name: &str| {
            let prefix = keys.key(name);
            let end = crate::etcd::after(&prefix);
            EtcdOperation::DeleteRange(prefix, end)
        };
        held.change(
            etcd,
            vec![
                EtcdOperation::put(keys.key("incomplete"), "1"),
                EtcdOperation::put(keys.key("rack"), rack_value(&self.rack, FIRST_ETCD_LAYOUT)),
                EtcdOperation::put(keys.key("term"), newest.saturating_add(1).to_string()),
                EtcdOperation::Delete(keys.key("moved")),
                EtcdOperation::Delete(keys.key("tokens")),
                folder("record/"),
                folder("answer/"),
                folder("certificate/"),
                folder("event/"),
            ],
        )
        .await?;
        // What was there is gone by now.
        let incomplete = |error| match error {
            SnapshotError::Interrupted => SnapshotError::Incomplete,
            other => other,
        };
        let mut batch = Vec::new();
        let mut bytes = 0;
        for op in operations(keys, &self.commit())? {
            bytes += op.bytes();
            batch.push(op);
            if batch.len() >= BATCH.0 || bytes >= BATCH.1 {
                held.change(etcd, std::mem::take(&mut batch)).await.map_err(incomplete)?;
                bytes = 0;
            }
        }
        held.change(etcd, batch).await.map_err(incomplete)?;
        let mut last = vec![EtcdOperation::Delete(keys.key("incomplete"))];
        if let Some((certificate, key)) = &self.identity {
            let authority = CertificateAuthority::from_pem(certificate, key)?;
            last.push(EtcdOperation::put(keys.key("identity"), identity_value(&authority)));
        }
        if let Some(tokens) = &self.tokens {
            last.push(EtcdOperation::put(keys.key("tokens"), tokens.as_str()));
        }
        held.change(etcd, last).await.map_err(incomplete)
    }
}

/// Whether something of a rack is there beside its name and its authority.
async fn occupies(etcd: &mut EtcdClient, keys: &Keys) -> Result<bool, SnapshotError> {
    let first = KeyRange { limit: 1, ..KeyRange::of(&keys.key("record/")) };
    Ok(!etcd.range(&first).await?.values.is_empty())
}

/// The leader's key, held by who reads or changes a state as a whole: no control plane leads meanwhile.
#[derive(Debug)]
pub struct LeaderKeyHold {
    keys: Keys,
    lease: EtcdLease,
    revision: Revision,
}

impl LeaderKeyHold {
    /// Takes it, while nobody has it.
    ///
    /// # Errors
    /// [`SnapshotError`], among them that somebody leads.
    pub async fn take(etcd: &mut EtcdClient, keys: &Keys) -> Result<LeaderKeyHold, SnapshotError> {
        let (seen, leader) = election::seen(&etcd.txn(&election::look(keys)).await?);
        if seen.leader.is_some() {
            let url = leader.map(|it| it.url).unwrap_or_default();
            return Err(SnapshotError::HasLeader(url));
        }
        let (lease, _) = etcd.grant(TTL).await?;
        let pid = std::process::id();
        let (version, url) = (env!("CARGO_PKG_VERSION").to_owned(), "(a restore)".to_owned());
        let own = Member { id: format!("restore-{pid:x}"), url, version, pid };
        let value = serde_json::to_string(&own).unwrap_or_default();
        let (leader, keys) = (keys.key("leader"), keys.clone());
        let take = Txn {
            compares: vec![Compare::Created(leader.clone(), 0)],
            then: vec![EtcdOperation::Put { key: leader, value, lease: Some(lease) }],
            otherwise: Vec::new(),
        };
        let done = etcd.txn(&take).await?;
        match done.succeeded {
            true => Ok(LeaderKeyHold { keys, lease, revision: done.revision }),
            false => Err(SnapshotError::Interrupted),
        }
    }

    /// Notes that the state has gone to `place`: no control plane begins with it any more.
    ///
    /// # Errors
    /// [`SnapshotError`], among them that somebody leads since.
    pub async fn leave(&self, etcd: &mut EtcdClient, place: &str) -> Result<(), SnapshotError> {
        self.change(etcd, vec![EtcdOperation::put(self.keys.key("moved"), place)]).await
    }

    /// Gives up the key of the leader, so that control planes lead again.
    pub async fn release(self, etcd: &mut EtcdClient) {
        // Where that fails, the lease ends by itself.
        drop(etcd.revoke(self.lease).await);
    }

    async fn change(
        &self,
        etcd: &mut EtcdClient,
        then: Vec<EtcdOperation>,
    ) -> Result<(), SnapshotError> {
        // Each takes as long as etcd takes, and there may be hundreds.
        if etcd.renew(self.lease).await?.is_none() {
            return Err(SnapshotError::Interrupted);
        }
        let compares = vec![Compare::Created(self.keys.key("leader"), self.revision)];
        match etcd.txn(&Txn { compares, then, ..Txn::default() }).await?.succeeded {
            true => Ok(()),
            false => Err(SnapshotError::Interrupted),
        }
    }
}

/// The values under a prefix.
fn under<T: serde::de::DeserializeOwned>(
    all: &[KeyValue],
    prefix: &str,
) -> Result<Vec<T>, SnapshotError> {
    let found = all.iter().filter(|it| it.key.starts_with(prefix));
    let read = found.map(|it| {
        serde_json::from_str(&it.value)
            .map_err(|cause| SharedError::Value(it.key.clone(), cause).into())
    });
    read.collect()
}
