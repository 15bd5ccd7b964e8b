//! What the control plane does to change a lease's service level: asks its lender, and waits for the answer.

use rackbus_lease::{ChangeRefused, LeaseId, LeaseState, LevelChange};

use super::leases::PATIENCE;
use super::{Service, WriterRequest, present, problem};
use crate::answers::KeyedChange;
use crate::api::{ApiError, Lease};
use crate::levels::{LevelRequest, check_level};

impl Service {
    /// Changes the service level of a lease, and waits until its lender has decided. Who goes away meanwhile
    /// changes nothing by that. Asked again with the same idempotency key, a level that somebody asked for since
    /// stays.
    ///
    /// # Errors
    /// [`ApiError`], with what would fit where the level cannot be kept.
    pub async fn change_level(
        &self,
        lease: LeaseId,
        request: &LevelRequest,
        key: Option<String>,
    ) -> Result<Lease, ApiError> {
        let level = &request.level;
        check_level(level.as_deref())?;
        let (asked, keyed) = (level.clone(), KeyedChange::new(key, "level", &(lease, level)));
        let ask = |answer| WriterRequest::ChangeLevel { lease, level: asked, keyed, answer };
        // None where it has that level anyway.
        let number = self.writing.ask(ask).await?.map_err(explain)?;
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let answered = self.shared.wait(deadline, |known| {
            let record = known.leases.get(&lease)?;
            if !matches!(record.state, LeaseState::Active { .. }) {
                return Some(Err(ended(lease, &record.state)));
            }
            if number == 0 {
                return Some(Ok(present(record)));
            }
            // Somebody else may have changed it again already.
            let change = record.change.as_ref().filter(|change| change.number >= number)?;
            let LevelChange { level: asked, outcome, .. } = change;
            match outcome {
                Some(Err(reason)) if asked == level => {
                    Some(Err(refused(reason, record.level.as_deref())))
                }
                Some(_) => Some(Ok(present(record))),
                None if asked != level => Some(Ok(present(record))),
                None => None,
            }
        });
        answered.await.unwrap_or_else(|| {
            Err(problem(
                "timeout",
                format!(
                    "the lender has not decided about the level of lease {lease} in {PATIENCE:?}"
                ),
                "the control plane goes on asking; `rackbus status` tells how the nodes are",
            ))
        })
    }
}

fn refused(reason: &str, level: Option<&str>) -> ApiError {
    let kept = match level {
        Some(level) => format!("`{level}` stays in force; ask for less"),
        None => "the lease goes on without a level; ask for less".to_owned(),
    };
    problem("level_refused", reason.to_owned(), &kept)
}

fn ended(lease: LeaseId, state: &LeaseState) -> ApiError {
    match state {
        LeaseState::Ended { reason } | LeaseState::Closing { reason, .. } => {
            explain(ChangeRefused::Ended { lease, reason: reason.clone() })
        }
        _ => explain(ChangeRefused::NotActive(lease)),
    }
}

fn explain(refused: ChangeRefused) -> ApiError {
    let (code, help) = match &refused {
        ChangeRefused::Unknown(_) => ("unknown_lease", "`rackbus leases` lists them"),
        ChangeRefused::Ended { .. } => ("over", "borrow the function anew, with the level"),
        ChangeRefused::NotActive(_) => ("level_refused", "try again in a moment"),
        ChangeRefused::UnderWay(_) => ("level_refused", "wait for its end, and ask again"),
    };
    problem(code, refused.to_string(), help)
}
