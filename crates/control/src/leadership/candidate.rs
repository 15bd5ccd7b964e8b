//! A process that is a candidate: does what the core says, and has somebody lead.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::core::{CandidateConfig, EtcdUnavailable, Leadership, LeadershipAction, Won};
use super::election::{self, Member};
use super::members::Members;
use super::tenure::{Tenure, machine_clock, now};
use crate::etcd::{Cluster, EtcdClient, EtcdLease, KvError};
use crate::store::Keys;

/// What a candidate is now.
#[derive(Debug, Clone, Default)]
pub enum Standing {
    /// Nothing is known yet, or etcd cannot be reached; since it was so, why.
    #[default]
    Unknown,
    /// Somebody else leads, or nobody at this moment.
    Follows(Option<Member>),
    /// This process leads for this tenure.
    Leads(Arc<Tenure>),
}

/// What everybody in the process may know of its candidacy.
#[derive(Debug)]
pub struct Candidacy {
    /// Who leads, as far as this process knows.
    pub standing: watch::Receiver<Standing>,
    /// Who else is there, and how etcd is.
    pub members: watch::Receiver<Members>,
}

/// Who campaigns, and where.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The members of etcd, and how they are spoken to.
    pub cluster: Cluster,
    /// Where the rack's keys are.
    pub keys: Keys,
    /// This process, as it is listed among the control planes.
    pub member: Member,
    /// Time to live of its lease, in seconds; etcd may have a greater least one.
    pub ttl: u64,
}

impl Candidate {
    /// Campaigns, until the receiver of `stop` is told to end: then it gives up what it leads at once.
    pub fn start(self, stop: watch::Receiver<bool>) -> Candidacy {
        let (standing, seen) = watch::channel(Standing::default());
        let (members, known) = watch::channel(Members::default());
        let config = CandidateConfig::of_ttl(self.ttl * 1000);
        let client = || self.cluster.client(Duration::from_millis(config.renew));
        let etcd = client();
        tokio::spawn(super::members::watch(client(), self.keys.clone(), members));
        let run = Run {
            core: Leadership::new(config),
            etcd,
            candidate: self,
            standing,
            tenure: None,
            announced: None,
            lease: None,
            reachable: true,
        };
        tokio::spawn(run.run(stop));
        Candidacy { standing: seen, members: known }
    }
}

struct Run {
    core: Leadership,
    etcd: EtcdClient,
    candidate: Candidate,
    standing: watch::Sender<Standing>,
    tenure: Option<Arc<Tenure>>,
    /// The lease by which the others were told of this one.
    announced: Option<EtcdLease>,
    /// The lease that was granted last.
    lease: Option<EtcdLease>,
    /// Whether etcd answered last.
    reachable: bool,
}

impl Run {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        loop {
            if self.tenure.as_ref().is_some_and(|tenure| tenure.is_over())
                && self.core.until().is_some()
            {
                // The store has found out.
                self.core.lost();
            }
            if let Some(action) = self.core.poll(now()) {
                tokio::select! {
                    () = self.act(action) => {}
                    () = asked_to_end(&mut stop) => return self.end().await,
                }
                if let (Some(tenure), Some(until)) = (&self.tenure, self.core.until()) {
                    tenure.extend(until);
                }
                continue;
            }
            let wait = Duration::from_millis(self.core.next().saturating_sub(now()).max(1));
            let over = self.tenure.clone();
            let over = async {
                match over {
                    Some(tenure) => tenure.ended().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = over => {}
                () = asked_to_end(&mut stop) => return self.end().await,
            }
        }
    }

    async fn act(&mut self, action: LeadershipAction) {
        let sent = now();
        match action {
            LeadershipAction::Grant => {
                let outcome = self.etcd.grant(self.candidate.ttl).await;
                let outcome = self.heard(outcome).map(|(lease, seconds)| (lease, seconds * 1000));
                self.core.granted(sent, now(), outcome);
                self.lease = self.core.lease();
                self.announce().await;
            }
            LeadershipAction::Renew(lease) => {
                let outcome = self.etcd.renew(lease).await;
                let outcome = self.heard(outcome).map(|time| time.map(|seconds| seconds * 1000));
                self.core.renewed(sent, now(), outcome);
                self.announce().await;
            }
            LeadershipAction::Look => {
                let outcome = self.etcd.txn(&election::look(&self.candidate.keys)).await;
                let outcome = self.heard(outcome).map(|done| election::seen(&done));
                if self.tenure.is_none() {
                    let leader = outcome.as_ref().ok().and_then(|(_, leader)| leader.clone());
                    self.standing.send_if_modified(|standing| follow(standing, &outcome, leader));
                }
                self.core.looked(now(), outcome.map(|(seen, _)| seen));
            }
            LeadershipAction::Campaign { lease, term, term_revision } => {
                let Candidate { keys, member, .. } = &self.candidate;
                let txn = election::campaign(keys, member, lease, term, term_revision);
                let outcome = self.etcd.txn(&txn).await;
                let outcome = self.heard(outcome).map(|done| election::won(&done, term));
                self.core.campaigned(now(), outcome);
            }
            LeadershipAction::Lead(won) => self.lead(won),
            LeadershipAction::Stop(why) => {
                tracing::warn!(why, "this control plane is no longer the leader");
                if let Some(tenure) = self.tenure.take() {
                    tenure.end();
                }
                self.standing.send_replace(Standing::Follows(None));
                // Where the lease continues, nobody else could lead until it ends.
                if let Some(lease) = self.lease.take() {
                    drop(self.etcd.revoke(lease).await);
                }
            }
        }
    }

    fn lead(&mut self, won: Won) {
        let Some(until) = self.core.until() else { return };
        tracing::info!(
            term = won.term,
            revision = won.revision,
            "this control plane is the leader"
        );
        let tenure = Arc::new(Tenure::new(won, until, machine_clock()));
        self.tenure = Some(tenure.clone());
        self.standing.send_replace(Standing::Leads(tenure));
    }

    /// Lets the others know where this one is, for as long as its lease is there.
    async fn announce(&mut self) {
        let Some(lease) = self.core.lease().filter(|it| self.announced != Some(*it)) else {
            return;
        };
        let txn = super::members::announce(&self.candidate.keys, &self.candidate.member, lease);
        let announced = self.etcd.txn(&txn).await;
        if self.heard(announced).is_ok() {
            self.announced = Some(lease);
        }
    }

    fn heard<T>(&mut self, outcome: Result<T, KvError>) -> Result<T, EtcdUnavailable> {
        let reachable = outcome.is_ok();
        match &outcome {
            Err(error) if self.reachable => {
                tracing::error!(%error, "the control plane's store failed");
            }
            Ok(_) if !self.reachable => tracing::info!("etcd answers again"),
            _ => {}
        }
        self.reachable = reachable;
        outcome.map_err(|_| EtcdUnavailable)
    }

    /// The process ends: the next one may lead at once.
    async fn end(mut self) {
        if let Some(tenure) = self.tenure.take() {
            tenure.end();
        }
        self.standing.send_replace(Standing::Follows(None));
        if let Some(lease) = self.core.lease() {
            drop(self.etcd.revoke(lease).await);
        }
    }
}

/// Notes who leads; whether that is new.
fn follow<T>(
    standing: &mut Standing,
    outcome: &Result<T, EtcdUnavailable>,
    leader: Option<Member>,
) -> bool {
    let next = match outcome {
        Ok(_) => Standing::Follows(leader),
        Err(EtcdUnavailable) => Standing::Unknown,
    };
    let same = match (&*standing, &next) {
        (Standing::Follows(known), Standing::Follows(leader)) => known == leader,
        (Standing::Unknown, Standing::Unknown) => true,
        _ => false,
    };
    if !same {
        *standing = next;
    }
    !same
}

/// Waits until the process is to end.
async fn asked_to_end(stop: &mut watch::Receiver<bool>) {
    // Whoever could say so is gone: the same.
    let _ended = stop.wait_for(|stop| *stop).await.is_ok();
}
