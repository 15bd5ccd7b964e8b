//! The control planes of a rack that are there, and how their store is: for people, and for nodes that look for them.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::election::Member;
use crate::etcd::{EtcdClient, EtcdLease, EtcdOperation, KeyRange, KvError, Txn};
use crate::store::Keys;

/// How long a control plane waits before it looks again which others there are.
const LOOK: Duration = Duration::from_secs(1);

/// What is known of the control planes and their store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Members {
    /// Those that are there, by where they are reached.
    pub members: Vec<Member>,
    /// Whether the store answers, its version and its size.
    pub store: StoreHealth,
}

/// How the store is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreHealth {
    /// Whether the store answered when it was asked last.
    pub healthy: bool,
    /// Why it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The version of etcd; empty where the store is SQLite.
    #[serde(default)]
    pub version: String,
    /// Bytes of its database, where that is known.
    #[serde(default)]
    pub bytes: u64,
}

/// Says that `member` is there, while `lease` is.
pub fn announce(keys: &Keys, member: &Member, lease: EtcdLease) -> Txn {
    let key = keys.key(&format!("members/{}", member.id));
    let value = serde_json::to_string(member).unwrap_or_default();
    Txn { then: vec![EtcdOperation::Put { key, value, lease: Some(lease) }], ..Txn::default() }
}

/// Looks again and again who is there, until nobody listens.
pub(super) async fn watch(mut etcd: EtcdClient, keys: Keys, known: watch::Sender<Members>) {
    while !known.is_closed() {
        let next = match read(&mut etcd, &keys).await {
            Ok(members) => members,
            Err(error) => {
                let error = Some(error.to_string());
                let store = StoreHealth { healthy: false, error, ..known.borrow().store.clone() };
                Members { store, ..known.borrow().clone() }
            }
        };
        known.send_if_modified(|known| {
            let changed = *known != next;
            *known = next;
            changed
        });
        tokio::time::sleep(LOOK).await;
    }
}

async fn read(etcd: &mut EtcdClient, keys: &Keys) -> Result<Members, KvError> {
    let page = etcd.range(&KeyRange::of(&keys.key("members/"))).await?;
    let (version, bytes) = etcd.health().await?;
    let members = page.values.iter().filter_map(|found| serde_json::from_str(&found.value).ok());
    let mut members: Vec<Member> = members.collect();
    members.sort_by(|a, b| (&a.url, &a.id).cmp(&(&b.url, &b.id)));
    Ok(Members { members, store: StoreHealth { healthy: true, error: None, version, bytes } })
}
