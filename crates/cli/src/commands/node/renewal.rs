//! A joined node's certificate is renewed in time, and when the rack gets other certificate authorities.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rackbus_control::ControlClient;
use rackbus_control::leaders::Leaders;
use rackbus_identity::{CertificateRequest, Credentials, Renewed, random};
use tokio::sync::watch;

use super::joined::{AGAIN, unusable};
use crate::output::Failure;
use crate::remote::not_reached;

/// Between two looks whether the certificate is to be renewed, at most and at least. With the shortest life there are six
/// looks in the time in which it may be.
const RENEWALS: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(1));
/// Over how long the nodes' renewals are spread after the rack's certificate authorities have changed.
const SPREAD: Duration = Duration::from_secs(5);
/// The longest time between two tries to get a certificate of the authorities that there are.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Renews the certificate when it is time for that, or the rack has other authorities than it was made by, as
/// `authorities` says.
pub async fn renew(
    credentials: Renewed,
    control: Arc<Leaders>,
    state_dir: PathBuf,
    mut authorities: watch::Receiver<Vec<String>>,
) {
    let mut is_saved = true;
    let (mut told, mut failed) = (None, 0);
    let own = credentials.read().unwrap_or_else(PoisonError::into_inner).clone();
    let mut shown = own.certified().serial.clone();
    loop {
        let mut current = credentials.read().unwrap_or_else(PoisonError::into_inner).clone();
        let of_rack = authorities.borrow_and_update().clone();
        if !is_saved {
            is_saved = save(&current, &state_dir);
        }
        if current.is_due() || !current.are_of(&of_rack) {
            match renewed(&control).await {
                Ok(next) => {
                    // Saved before anybody is shown it, since the one before is of no more use then. Used also where it cannot be
                    // saved: that one ends soon.
                    is_saved = save(&next, &state_dir);
                    *credentials.write().unwrap_or_else(PoisonError::into_inner) = next.clone();
                    (current, told, failed) = (next, None, 0);
                }
                Err(failure) => {
                    failed += 1;
                    // Once for each cause: it is tried again soon.
                    if told.as_ref() != Some(&failure.error) {
                        tracing::error!(error = failure.error, "the certificate was not renewed");
                        told = Some(failure.error);
                    }
                }
            }
        }
        if is_saved && current.certified().serial != shown {
            // Who has shown the new one needs the one before no more. Where that fails, another request shows it.
            shown = current.certified().serial.clone();
            drop(ControlClient::of(control.clone()).authorities().await);
        }
        let life = current.certified().life();
        let wait = match current.are_of(&of_rack) {
            true => until_next_look(life),
            false => until_next_look(life).min(after_failures(failed)),
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            // Who says what there is lives as long as this. All nodes hear of it at once: they do not ask at once.
            _ = authorities.changed() => tokio::time::sleep(part_of(SPREAD.min(life / 30))).await,
        }
    }
}

/// Writes down a certificate that was got now; whether that went well.
fn save(credentials: &Credentials, state_dir: &Path) -> bool {
    let saved = credentials.save(state_dir);
    if let Err(error) = &saved {
        tracing::error!(
            %error,
            "the renewed certificate is not saved, and would be missing after a restart"
        );
    }
    saved.is_ok()
}

/// How long to wait before the next try after so many renewals in a row that failed.
fn after_failures(failed: u32) -> Duration {
    (RENEWALS.1 * 2_u32.saturating_pow(failed.saturating_sub(1).min(8))).min(LONGEST_PAUSE)
}

/// A random part of `whole`, another one in each process.
fn part_of(whole: Duration) -> Duration {
    whole.mul_f64(f64::from(u32::from_ne_bytes(random())) / 2_f64.powi(32))
}

/// How long to wait before it is looked again whether a certificate that is good for `life` is to be renewed: several times
/// in the third of it in which it may be, as the control plane may be out of reach; ten where it is good for 30 s or more.
fn until_next_look(life: Duration) -> Duration {
    let (most, least) = RENEWALS;
    (life / 30).clamp(least, most)
}

async fn renewed(control: &Arc<Leaders>) -> Result<Credentials, Failure> {
    let request = CertificateRequest::new().map_err(unusable)?;
    let client = ControlClient::of(control.clone());
    let certificates =
        client.renew(request.text()).await.map_err(|error| not_reached(error, AGAIN))?;
    request.answered(&certificates).map_err(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewals_are_spread_and_tried_again_in_growing_intervals() {
        let waits = [1, 2, 3, 6, 100].map(|failed| after_failures(failed).as_secs());
        assert_eq!(waits, [1, 2, 4, 30, 30]);
        let parts: Vec<Duration> = (0..100).map(|_| part_of(SPREAD)).collect();
        assert!(parts.iter().all(|it| *it < SPREAD));
        let late = parts.iter().filter(|it| **it > SPREAD / 2).count();
        assert!((10..=90).contains(&late), "{parts:?}");
    }
}
