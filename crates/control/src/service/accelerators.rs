//! An accelerator is chosen for who asks for a service level and names none. [`rackbus_qos::choice`] decides in which
//! order devices are asked; the lenders decide whether they keep the level, and are asked in turn for a bounded time.

mod candidates;

use std::cmp::Reverse;
use std::time::Duration;

use rackbus_lease::{EndReason, FunctionId, LeaseId, LeaseState, Terms};
use rackbus_qos::{LevelRefused, Outlook, RankedDevice, Rate, ServiceLevel, rank};
use tokio::time::{Instant, timeout_at};

use super::Service;
use super::leases::{FunctionsRequest, function_id};
use super::views::problem;
use super::writer::{ChosenFunction, Granted, WriterRequest};
use crate::api::{AcceleratorChoice, AcceleratorOffer, ApiError, BorrowRequest, Lease};

/// No lender is asked any more so long after the first one was; whoever was asked last has its time beyond that.
const CHOICE_PATIENCE: Duration = Duration::from_secs(20);

/// Devices whose answers a refusal tells in words; the others are among its offers.
const TOLD: usize = 8;

/// The functions that a request for whichever accelerator names.
const NONE_NAMED: &[FunctionId] = &[];

/// A request for whichever accelerator keeps a level, and what came of it so far.
struct AcceleratorSearch<'a> {
    request: &'a BorrowRequest,
    level: ServiceLevel,
    terms: Terms,
    key: Option<String>,
    /// The lease that was asked for last, and refused.
    refused: Option<LeaseId>,
    /// What devices said to the level, with the rate that each would keep.
    offers: Vec<(Option<Rate>, AcceleratorOffer)>,
}

/// What came of asking for one function.
enum AskOutcome {
    /// It can be used.
    Lent(Box<Lease>),
    /// Others have it or come first, or its lender is gone.
    Busy,
    /// It is not lent, for this reason: another device may be.
    Refused(String),
    /// No device can be lent.
    Over(ApiError),
}

impl AcceleratorSearch<'_> {
    /// Notes what `device` said to the level; `fits`: what it would keep.
    fn note(&mut self, device: &str, fits: Option<Rate>, reason: String) {
        // Nothing is no offer.
        let rate = fits.filter(|rate| rate.per_second > 0);
        let fits = rate.map(|min| with_minimum(&self.level, min).to_string());
        self.offers.push((rate, AcceleratorOffer { device: device.to_owned(), fits, reason }));
    }

    /// The refusal, with all that devices said: the largest offer first.
    fn refusal(self) -> ApiError {
        let AcceleratorSearch { level, mut offers, .. } = self;
        offers.sort_by_key(|(rate, offer)| {
            (Reverse(rate.map(|rate| rate.per_second)), offer.device.clone())
        });
        let offers: Vec<AcceleratorOffer> = offers.into_iter().map(|(_, offer)| offer).collect();
        let said = |offer: &AcceleratorOffer| format!("{}: {}", offer.device, offer.reason);
        let told: Vec<String> = offers.iter().take(TOLD).map(said).collect();
        let more = match offers.len().saturating_sub(TOLD) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        let error = format!("no accelerator keeps `{level}`: {}{more}", told.join("; "));
        let remedy = match offers.first().and_then(|offer| offer.fits.as_ref()) {
            Some(fits) => format!("ask for `{fits}` at most"),
            None => "`rackbus accel list` shows the accelerators".to_owned(),
        };
        ApiError { offers: Some(Box::new(offers)), ..problem("level_refused", error, &remedy) }
    }
}

/// The same level with another minimum.
fn with_minimum(level: &ServiceLevel, min: Rate) -> ServiceLevel {
    let less = ServiceLevel { min, ..level.clone() };
    // What may come at once is bounded by the minimum.
    if less.check().is_err() { ServiceLevel { burst: 0, ..less } } else { less }
}

fn none_free() -> ApiError {
    let error = "no accelerator that may be used has a function free".to_owned();
    problem("none_free", error, "see `rackbus accel list`, and return one, or wait with `--wait`")
}

impl Service {
    /// Borrows whichever accelerator keeps a level, as [`borrow`](Service::borrow) borrows a function. Where none has a
    /// function free, a request that waits does so until one has; it has no place in the queue of any function.
    pub(super) async fn borrow_accelerator(
        &self,
        request: &BorrowRequest,
        wanted: &AcceleratorChoice,
        key: Option<String>,
    ) -> Result<Lease, ApiError> {
        let borrower = &request.borrower;
        let mut search = match self.search(request, wanted, key) {
            Ok(search) => search,
            Err(refused) => return Err(self.refuse(borrower, NONE_NAMED, refused).await),
        };
        match self.recall(&mut search).await? {
            AskOutcome::Lent(lease) => return Ok(*lease),
            AskOutcome::Over(error) => return Err(error),
            AskOutcome::Busy | AskOutcome::Refused(_) => {}
        }
        let wait_until = request.wait()?.map(|wait| Instant::now() + wait);
        if !self.shared.nodes_come(borrower).await {
            let error = format!("nothing is heard of {borrower}");
            let remedy = format!("see whether the node of {borrower} runs: `rackbus status`");
            return Err(self.refuse(borrower, NONE_NAMED, problem("silent", error, &remedy)).await);
        }
        loop {
            let mut steps = self.shared.steps.subscribe();
            let ranked = rank(&search.level, self.shared.candidates(request, &search.terms));
            let any = !ranked.is_empty();
            if let Some(done) = self.ask_in_turn(&mut search, ranked).await {
                return done;
            }
            if !search.offers.is_empty() {
                return Err(self.refuse(borrower, NONE_NAMED, search.refusal()).await);
            }
            // Somebody else was faster everywhere, or nothing is free.
            let come = match wait_until {
                None => false,
                Some(until) if any => timeout_at(until, steps.changed()).await.is_ok(),
                Some(until) => self.shared.free_accelerator(request, until).await,
            };
            if !come {
                return Err(self.refuse(borrower, NONE_NAMED, none_free()).await);
            }
        }
    }

    /// What a request asks for, if that can be.
    fn search<'a>(
        &self,
        request: &'a BorrowRequest,
        wanted: &AcceleratorChoice,
        key: Option<String>,
    ) -> Result<AcceleratorSearch<'a>, ApiError> {
        request.check_target()?;
        request.wait()?;
        let asked =
            BorrowRequest { level: Some(wanted.level.clone()), ..BorrowRequest::clone(request) };
        let mut terms = asked.terms()?;
        let level = wanted.level.parse::<ServiceLevel>().map_err(|error| {
            let remedy = "write it as `aes256gcm 4 Gbit/s`";
            problem("bad_request", error.to_string(), remedy)
        })?;
        self.shared.check_host(&request.borrower)?;
        self.shared.check_apart(request.placement, "an accelerator")?;
        terms.placement = self.shared.placed(terms.placement);
        self.shared.check_candidates(&terms, &request.borrower)?;
        Ok(AcceleratorSearch { request, level, terms, key, refused: None, offers: Vec::new() })
    }

    /// What came of the same request when it was made before; as if refused where it was not.
    async fn recall(&self, search: &mut AcceleratorSearch<'_>) -> Result<AskOutcome, ApiError> {
        let Some(key) = search.key.clone() else { return Ok(AskOutcome::Busy) };
        let (borrower, terms) = (search.request.borrower.clone(), search.terms.clone());
        let ask = |answer| WriterRequest::Recall { borrower, terms, key, answer };
        match self.writing.ask(ask).await? {
            Some(granted) => Ok(self.come_of(search, granted, "an accelerator").await),
            None => Ok(AskOutcome::Busy),
        }
    }

    /// Asks one device after another, each for one function as long as others do not have it. Nothing where none lends.
    async fn ask_in_turn(
        &self,
        search: &mut AcceleratorSearch<'_>,
        ranked: Vec<RankedDevice>,
    ) -> Option<Result<Lease, ApiError>> {
        let until = Instant::now() + CHOICE_PATIENCE;
        for RankedDevice { name, functions, outlook } in ranked {
            let fits = match outlook {
                // It would say the same whatever others return.
                Outlook::Refuses(
                    refused @ (LevelRefused::Unshaped | LevelRefused::Engine { .. }),
                ) => {
                    search.note(&name, None, refused.to_string());
                    continue;
                }
                Outlook::Refuses(refused) => refused.fits(),
                Outlook::Keeps(_) | Outlook::Unknown => None,
            };
            if Instant::now() >= until {
                let reason = "it was not asked, as the answers of others took too long".to_owned();
                search.note(&name, fits, reason);
                continue;
            }
            for function in functions {
                match self.ask_for(search, &function).await {
                    AskOutcome::Lent(lease) => return Some(Ok(*lease)),
                    AskOutcome::Over(error) => return Some(Err(error)),
                    AskOutcome::Busy => {}
                    AskOutcome::Refused(reason) => {
                        search.note(&name, LevelRefused::offered(&reason), reason);
                        break;
                    }
                }
            }
        }
        None
    }

    /// Asks for one function.
    async fn ask_for(&self, search: &mut AcceleratorSearch<'_>, function: &str) -> AskOutcome {
        let id = match function_id(function) {
            Ok(id) => id,
            Err(error) => return AskOutcome::Over(error),
        };
        let asked = FunctionsRequest {
            functions: vec![id],
            borrower: &search.request.borrower,
            terms: search.terms.clone(),
            key: search.key.clone(),
            chosen: Some(ChosenFunction { instead_of: search.refused }),
        };
        match self.grant(asked, None, search.request.priority).await {
            Ok(granted) => self.come_of(search, granted, function).await,
            Err(error) => match error.code.as_str() {
                // Somebody else was faster, or its lender went meanwhile: it has said nothing to the level.
                "held" | "returning" | "queued" | "shared" | "silent" | "withdrawn"
                | "unknown_function" => AskOutcome::Busy,
                _ => AskOutcome::Over(error),
            },
        }
    }

    /// Waits for what was granted. `what`: its name, for people.
    async fn come_of(
        &self,
        search: &mut AcceleratorSearch<'_>,
        granted: Granted,
        what: &str,
    ) -> AskOutcome {
        let wanted = match granted {
            Granted::Answered(answer, _) => match *answer {
                Ok(lease) => return AskOutcome::Lent(Box::new(lease)),
                Err(error) => return AskOutcome::Over(error),
            },
            Granted::Leases(wanted) => wanted,
        };
        search.refused = wanted.first().map(|wanted| wanted.lease);
        let error = match self.settle(wanted, what, &search.request.borrower).await {
            Ok(mut leases) => return AskOutcome::Lent(Box::new(leases.remove(0))),
            Err(error) => error,
        };
        let known = self.shared.known();
        let record = search.refused.and_then(|lease| known.leases.get(&lease));
        match record.map(|record| &record.state) {
            Some(LeaseState::Ended { reason: EndReason::LenderFailed(how) }) => {
                AskOutcome::Refused(how.clone())
            }
            Some(LeaseState::Ended {
                reason:
                    reason @ (EndReason::LenderLost(_)
                    | EndReason::LenderRestarted
                    | EndReason::Withdrawn),
            }) => AskOutcome::Refused(reason.to_string()),
            Some(LeaseState::Ended { .. }) => AskOutcome::Over(error),
            // It took too long.
            _ => AskOutcome::Refused(error.error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_tells_of_each_device_with_the_largest_offer_first() {
        let request = BorrowRequest::of_accelerator("copy 90 Gbit/s burst 64 KiB", "beta");
        let level: ServiceLevel =
            request.accelerator.as_ref().unwrap().level.parse().expect("a level");
        let (key, terms) = (None, request.terms().unwrap());
        let mut search = AcceleratorSearch {
            request: &request,
            level,
            terms,
            key,
            refused: None,
            offers: Vec::new(),
        };
        let rate = |text: &str| Some(text.parse::<Rate>().unwrap());
        search.note("alpha/a", None, "it is not shaped".to_owned());
        search.note("beta/a", rate("1 Mbit/s"), "1 Mbit/s would fit".to_owned());
        search.note("gamma/a", rate("3 Gbit/s"), "3 Gbit/s would fit".to_owned());
        search.note("delta/a", rate("0 Gbit/s"), "0 op/s would fit".to_owned());
        let refusal = search.refusal();
        let said: Vec<(&str, Option<&str>)> = refusal
            .offers
            .iter()
            .flat_map(|it| it.iter())
            .map(|it| (it.device.as_str(), it.fits.as_deref()))
            .collect();
        // Of the least, such a burst is more than a tenth of a second.
        let (most, least) =
            ("copy 3 Gbit/s message 4 KiB burst 65536", "copy 1 Mbit/s message 4 KiB");
        let expected = [
            ("gamma/a", Some(most)),
            ("beta/a", Some(least)),
            ("alpha/a", None),
            ("delta/a", None),
        ];
        assert_eq!(said, expected);
        for (_, fits) in said {
            fits.map(|fits| fits.parse::<ServiceLevel>().unwrap());
        }
        assert_eq!(refusal.remedy, format!("ask for `{most}` at most"));
        assert_eq!(
            refusal.error,
            "no accelerator keeps `copy 90 Gbit/s message 4 KiB burst 65536`: gamma/a: 3 Gbit/s would fit; \
             beta/a: 1 Mbit/s would fit; alpha/a: it is not shaped; delta/a: 0 op/s would fit"
        );
    }
}
