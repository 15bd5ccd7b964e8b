//! The transactions by which a leader is made, and what their answers say.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::core::{SeenKeys, Won};
use crate::etcd::{Compare, EtcdLease, EtcdOperation, KeyValue, Revision, TransactionResult, Txn};
use crate::store::Keys;

/// A control plane as the others and the nodes know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// What tells this process from all others.
    pub id: String,
    /// Where it is reached: `https://HOST:PORT`.
    pub url: String,
    /// Version of its program.
    pub version: String,
    /// Its process, on its machine.
    pub pid: u32,
}

/// The transaction that reads who leads, and the newest term.
pub fn look(keys: &Keys) -> Txn {
    let then = vec![EtcdOperation::Get(keys.key("leader")), EtcdOperation::Get(keys.key("term"))];
    Txn { then, ..Txn::default() }
}

/// What [`look`] found, and who leads.
pub fn seen(done: &TransactionResult) -> (SeenKeys, Option<Member>) {
    let [leader, term] = &done.found[..] else {
        return (SeenKeys { leader: None, term: 0, term_revision: 0 }, None);
    };
    let seen = SeenKeys {
        leader: leader.as_ref().map(|it| (it.lease, it.created)),
        term: term.as_ref().map_or(0, number),
        term_revision: term.as_ref().map_or(0, |it| it.modified),
    };
    (seen, leader.as_ref().and_then(|it| serde_json::from_str(&it.value).ok()))
}

fn number(found: &KeyValue) -> u64 {
    found.value.parse().unwrap_or(0)
}

/// Takes the leadership for `member`, if nobody has it and no term began meanwhile.
pub fn campaign(
    keys: &Keys,
    member: &Member,
    lease: EtcdLease,
    term: u64,
    term_revision: Revision,
) -> Txn {
    let (leader, newest) = (keys.key("leader"), keys.key("term"));
    let value = serde_json::to_string(member).unwrap_or_default();
    Txn {
        compares: vec![
            Compare::Created(leader.clone(), 0),
            Compare::Modified(newest.clone(), term_revision),
            // A state that went elsewhere, or is not there as a whole, is led by nobody.
            Compare::Created(keys.key("moved"), 0),
            Compare::Created(keys.key("incomplete"), 0),
        ],
        then: vec![
            EtcdOperation::Put { key: leader, value, lease: Some(lease) },
            EtcdOperation::put(newest, term.to_string()),
        ],
        otherwise: Vec::new(),
    }
}

/// What [`campaign`] came to; `None`: somebody else leads, or did meanwhile.
pub fn won(done: &TransactionResult, term: u64) -> Option<Won> {
    done.succeeded.then_some(Won { revision: done.revision, term })
}
