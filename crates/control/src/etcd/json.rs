//! What the gateway says and is told, as JSON: protocol buffers, with keys and values in Base64 and numbers of 64 bits as
//! texts.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{
    Compare, EtcdOperation, KeyValue, KvError, MOST_OPERATIONS, NESTED, Revision,
    TransactionResult, Txn,
};

pub(super) fn encode(text: &str) -> String {
    STANDARD.encode(text)
}

/// 64-bit numbers are texts in the JSON of protocol buffers.
pub(super) fn number(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).or(value.as_i64()).unwrap_or(0)
}

pub(super) fn revision(answer: &Value) -> Revision {
    number(&answer["header"]["revision"])
}

pub(super) fn key_values(answer: &Value) -> Result<Vec<KeyValue>, KvError> {
    let text = |value: &Value| {
        let bytes = STANDARD.decode(value.as_str().unwrap_or_default()).ok();
        bytes
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .ok_or_else(|| KvError::Refused("a value that is no text".to_owned()))
    };
    let values = answer["kvs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let read = values.iter().map(|found| {
        Ok(KeyValue {
            key: text(&found["key"])?,
            value: text(&found["value"])?,
            created: number(&found["create_revision"]),
            modified: number(&found["mod_revision"]),
            lease: number(&found["lease"]),
        })
    });
    read.collect()
}

fn compare_json(compare: &Compare) -> Value {
    match compare {
        Compare::Created(key, revision) => json!({
            "key": encode(key), "target": "CREATE", "result": "EQUAL",
            "create_revision": revision.to_string(),
        }),
        Compare::Modified(key, revision) => json!({
            "key": encode(key), "target": "MOD", "result": "EQUAL",
            "mod_revision": revision.to_string(),
        }),
    }
}

fn op_json(op: &EtcdOperation) -> Value {
    match op {
        EtcdOperation::Put { key, value, lease } => json!({ "request_put": {
            "key": encode(key), "value": encode(value), "lease": lease.unwrap_or(0).to_string(),
        }}),
        EtcdOperation::Delete(key) => json!({ "request_delete_range": { "key": encode(key) }}),
        EtcdOperation::DeleteRange(from, to) => json!({ "request_delete_range": {
            "key": encode(from), "range_end": encode(to),
        }}),
        EtcdOperation::Get(key) => json!({ "request_range": { "key": encode(key) }}),
    }
}

/// More operations than etcd takes go as transactions of a transaction.
fn ops_json(ops: &[EtcdOperation]) -> Value {
    match ops.len() <= MOST_OPERATIONS {
        true => ops.iter().map(op_json).collect(),
        false => ops
            .chunks(NESTED)
            .map(|part| {
                let part: Vec<Value> = part.iter().map(op_json).collect();
                json!({ "request_txn": { "success": part }})
            })
            .collect(),
    }
}

pub(super) fn txn_json(txn: &Txn) -> Value {
    let compares: Vec<Value> = txn.compares.iter().map(compare_json).collect();
    json!({
        "compare": compares, "success": ops_json(&txn.then), "failure": ops_json(&txn.otherwise),
    })
}

pub(super) fn done(answer: &Value) -> Result<TransactionResult, KvError> {
    let responses = answer["responses"].as_array().map(Vec::as_slice).unwrap_or_default();
    let reads = responses.iter().map(|response| &response["response_range"]);
    let found = reads
        .filter(|read| read.is_object())
        .map(|read| Ok(key_values(read)?.into_iter().next()))
        .collect::<Result<_, KvError>>()?;
    let succeeded = answer["succeeded"].as_bool().unwrap_or(false);
    match revision(answer) {
        1.. => Ok(TransactionResult { succeeded, revision: revision(answer), found }),
        _ => Err(KvError::Unknown("its answer has no revision".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_operations_go_as_transactions_of_one() {
        let ops =
            |n: usize| (0..n).map(|n| EtcdOperation::Delete(n.to_string())).collect::<Vec<_>>();
        assert_eq!(ops_json(&ops(128)).as_array().unwrap().len(), 128);
        let nested = ops_json(&ops(129));
        assert_eq!(nested.as_array().unwrap().len(), 3);
        assert_eq!(nested[2]["request_txn"]["success"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn an_answer_without_a_revision_is_none() {
        assert!(matches!(done(&json!({})), Err(KvError::Unknown(_))));
        let answer = json!({ "header": { "revision": "7" }, "responses": [
            { "response_put": {} }, { "response_range": {} },
            { "response_range": { "kvs": [{ "key": "YQ==", "value": "Yg==", "create_revision": "3", "mod_revision": "5" }]}},
        ]});
        let done = done(&answer).unwrap();
        assert_eq!((done.succeeded, done.revision, done.found.len()), (false, 7, 2));
        let found = done.found[1].clone().unwrap();
        assert_eq!(
            (found.key.as_str(), found.value.as_str(), found.created, found.modified),
            ("a", "b", 3, 5)
        );
    }
}
