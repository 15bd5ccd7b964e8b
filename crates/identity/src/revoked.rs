//! Certificates that are taken back before they are over: which ones, and who is to hear of it.
//!
//! A revocation is of one certificate by its number, or of all that a host's node or a person was given until then.
//! What was given later is good: a host that joins again is let in. Whoever was told of a revocation keeps it for as long as it is
//! of use; there is no way to take one back. That is until the last certificate that it is about is over, and that of a host is
//! prolonged while the host has not joined anew: not everybody asks for certificates.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::{Certified, Serial, Subject};

/// What a revocation is about: one certificate, or all of a host or person.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Revoked {
    /// The certificate with this number.
    Serial(Serial),
    /// All that the node of this host was given.
    Host(String),
    /// All that this person was given, in whatever role.
    User(String),
}

/// In words, for messages: `host beta`, `user ann`, `certificate 3f…`.
impl fmt::Display for Revoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Revoked::Serial(serial) => write!(f, "certificate {serial}"),
            Revoked::Host(host) => write!(f, "host {host}"),
            Revoked::User(user) => write!(f, "user {user}"),
        }
    }
}

impl Revoked {
    /// Whether it is about this certificate, whenever that was made.
    pub fn is_about(&self, certified: &Certified) -> bool {
        match (self, &certified.subject) {
            (Revoked::Serial(serial), _) => *serial == certified.serial,
            (Revoked::Host(host), Subject::Node(node)) => host == node,
            (Revoked::User(user), Subject::Person(person)) => *user == person.user,
            _ => false,
        }
    }
}

/// That something was revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Its number; later ones have greater ones.
    pub number: u64,
    /// The certificate, host or person that it is about.
    pub what: Revoked,
    /// When, in seconds since 1970: certificates made later are good.
    pub at: u64,
    /// Until when it is of use, in seconds since 1970, unless it is prolonged: certificates that it is about are over then.
    pub until: u64,
}

impl Revocation {
    /// Whether `certified` is of no more use.
    pub fn covers(&self, certified: &Certified) -> bool {
        let later = !matches!(self.what, Revoked::Serial(_)) && certified.since > self.at;
        self.what.is_about(certified) && !later
    }
}

/// All revocations that are of use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationList {
    /// The number of the newest one there ever was.
    pub version: u64,
    /// In the order of their numbers.
    pub revoked: Vec<Revocation>,
}

/// Revocations that are kept at most.
pub const MOST_REVOKED: usize = 10_000;

impl RevocationList {
    /// The revocation of `certified`, if there is one.
    pub fn find(&self, certified: &Certified) -> Option<&Revocation> {
        self.revoked.iter().find(|it| it.covers(certified))
    }

    /// With what `other` has that this one has not. Nothing is taken back: whoever led before may tell less.
    #[must_use]
    pub fn merged(&self, other: &RevocationList, now: u64) -> RevocationList {
        let of_use = |list: &RevocationList| {
            list.revoked.iter().filter(|it| it.until > now).cloned().collect::<Vec<_>>()
        };
        let mut revoked = of_use(self);
        let mut places: BTreeMap<Revoked, usize> =
            revoked.iter().enumerate().map(|(place, it)| (it.what.clone(), place)).collect();
        for new in of_use(other) {
            match places.get(&new.what) {
                // One that was made later, or is of use for longer.
                Some(&place)
                    if (revoked[place].at, revoked[place].until) >= (new.at, new.until) => {}
                Some(&place) => revoked[place] = new,
                None if revoked.len() < MOST_REVOKED => {
                    places.insert(new.what.clone(), revoked.len());
                    revoked.push(new);
                }
                None => {}
            }
        }
        revoked.sort_by_key(|it| it.number);
        RevocationList { version: self.version.max(other.version), revoked }
    }
}

/// A certificate is revoked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate {serial} of {subject} was revoked")]
pub struct IsRevoked {
    /// The certificate's serial number, as `rackbus certificates` lists it.
    pub serial: Serial,
    /// Of whom it is.
    pub subject: Subject,
}

/// The revocations that are known here, and the connections of those whose certificates may still be revoked.
#[derive(Clone, Default)]
pub struct Revocations(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    next: AtomicU64,
}

#[derive(Default)]
struct State {
    list: RevocationList,
    open: BTreeMap<u64, Open>,
    /// Who is told of all that is told here.
    others: Vec<Revocations>,
}

struct Open {
    certified: Certified,
    end: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Revocations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revocations").finish_non_exhaustive()
    }
}

impl Revocations {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the list as it is known now.
    pub fn list(&self) -> RevocationList {
        self.state().list.clone()
    }

    /// Refuses a certificate that is revoked.
    ///
    /// # Errors
    /// [`IsRevoked`].
    pub fn check(&self, certified: &Certified) -> Result<(), IsRevoked> {
        checked(&self.state().list, certified)
    }

    /// Has `end` called when `certified` is revoked, for as long as what is returned is there. It must not wait.
    ///
    /// # Errors
    /// [`IsRevoked`], when it is by now.
    pub fn watch(
        &self,
        certified: Certified,
        end: impl Fn() + Send + Sync + 'static,
    ) -> Result<WatchedConnection, IsRevoked> {
        let mut state = self.state();
        checked(&state.list, &certified)?;
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let open = Open { certified: certified.clone(), end: Box::new(end) };
        state.open.insert(number, open);
        Ok(WatchedConnection { of: self.clone(), number, certified })
    }

    /// Learns of revocations at `now` (seconds since 1970), and ends the connections of those that are revoked.
    /// Whether there was something new.
    pub fn learn(&self, list: &RevocationList, now: u64) -> bool {
        let mut state = self.state();
        let merged = state.list.merged(list, now);
        let is_new = merged != state.list;
        state.list = merged;
        let State { list: known, open, others } = &mut *state;
        let (revoked, good) = std::mem::take(open)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, open)| known.find(&open.certified).is_some());
        *open = good;
        let others = others.clone();
        // Whoever is ended may come back here: what it has may drop its own `WatchedConnection`.
        drop(state);
        for open in revoked.values() {
            (open.end)();
        }
        drop(revoked);
        for other in &others {
            other.learn(list, now);
        }
        is_new
    }

    /// Tells `other` all that is known here, and all that is learned.
    pub fn tell(&self, other: &Revocations, now: u64) {
        let mut state = self.state();
        state.others.push(other.clone());
        let known = state.list.clone();
        drop(state);
        other.learn(&known, now);
    }
}

fn checked(list: &RevocationList, certified: &Certified) -> Result<(), IsRevoked> {
    let Certified { serial, subject, .. } = certified;
    match list.find(certified) {
        None => Ok(()),
        Some(_) => Err(IsRevoked { serial: serial.clone(), subject: subject.clone() }),
    }
}

/// A connection that is ended when its certificate is revoked.
#[derive(Debug)]
pub struct WatchedConnection {
    of: Revocations,
    number: u64,
    certified: Certified,
}

impl WatchedConnection {
    /// Has `end` called, too, when the certificate is revoked: for what outlives the connection. It must not wait.
    ///
    /// # Errors
    /// [`IsRevoked`], when it is by now.
    pub fn watch_also(
        &self,
        end: impl Fn() + Send + Sync + 'static,
    ) -> Result<WatchedConnection, IsRevoked> {
        self.of.watch(self.certified.clone(), end)
    }
}

impl Drop for WatchedConnection {
    fn drop(&mut self) {
        let gone = self.of.state().open.remove(&self.number);
        // What it has may end other things when it is dropped.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::{Person, Role};

    fn certified(subject: Subject, since: u64) -> Certified {
        Certified { subject, serial: Serial::new(), since, until: 1000 }
    }

    fn beta(since: u64) -> Certified {
        certified(Subject::Node("beta".into()), since)
    }

    fn ann(role: Role, since: u64) -> Certified {
        certified(Subject::Person(Person { user: "ann".into(), role }), since)
    }

    fn list(version: u64, revoked: &[(Revoked, u64)]) -> RevocationList {
        let each = revoked.iter().zip(1..).map(|((what, at), number)| Revocation {
            number,
            what: what.clone(),
            at: *at,
            until: 1000,
        });
        RevocationList { version, revoked: each.collect() }
    }

    #[test]
    fn a_revocation_is_about_what_was_given_until_then() {
        let one = beta(50);
        let revoked = [
            (Revoked::Host("beta".into()), 100),
            (Revoked::User("ann".into()), 100),
            (Revoked::Serial(beta(0).serial), 100),
        ];
        let list = list(3, &revoked);
        assert!(list.find(&beta(100)).is_some() && list.find(&beta(101)).is_none());
        for role in [Role::Reader, Role::Borrower("alpha".into())] {
            assert!(list.find(&ann(role.clone(), 100)).is_some());
            assert!(list.find(&ann(role, 101)).is_none());
        }
        // A host and a person of the same name are two.
        let user = Subject::Person(Person { user: "beta".into(), role: Role::Reader });
        assert!(list.find(&certified(user, 1)).is_none());
        assert!(list.find(&certified(Subject::Node("ann".into()), 1)).is_none());
        let by_number = Revoked::Serial(one.serial.clone());
        assert!(by_number.is_about(&one) && !by_number.is_about(&beta(50)));
    }

    #[test]
    fn peers_without_a_certificate_are_refused_while_a_revocation_of_all_is_kept() {
        let (known, host) =
            (Revocations::default(), || Certified::unshown(Subject::Node("beta".into())));
        let all = [(Revoked::Serial(beta(0).serial), 100), (Revoked::Host("gamma".into()), 100)];
        known.learn(&list(2, &all), 200);
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let _watched = known.watch(host(), move || end.store(true, Ordering::Relaxed)).unwrap();
        known.learn(&list(3, &[(Revoked::Host("beta".into()), 100)]), 200);
        assert!(ended.load(Ordering::Relaxed));
        assert!(known.check(&host()).is_err() && known.check(&beta(101)).is_ok());
        known.learn(&RevocationList::default(), 1000);
        assert!(known.check(&host()).is_ok(), "it is of no more use");
    }

    #[test]
    fn what_outlives_its_connection_ends_when_the_certificate_is_revoked_later() {
        let known = Revocations::default();
        let connection = known.watch(beta(50), || ()).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let watched = connection.watch_also(move || end.store(true, Ordering::Relaxed)).unwrap();
        drop(connection);
        known.learn(&list(1, &[(Revoked::Host("beta".into()), 100)]), 200);
        assert!(ended.load(Ordering::Relaxed));
        assert!(watched.watch_also(|| ()).is_err());
    }

    #[test]
    fn what_was_learned_is_kept_until_it_is_of_no_more_use() {
        let known = list(7, &[(Revoked::Host("beta".into()), 100)]);
        // Somebody who knows less, and somebody who knows more of the same.
        assert_eq!(known.merged(&RevocationList::default(), 200), known);
        let later = list(8, &[(Revoked::Host("beta".into()), 150)]);
        let merged = known.merged(&later, 200);
        assert_eq!((merged.version, merged.revoked.len(), merged.revoked[0].at), (8, 1, 150));
        assert_eq!(merged.merged(&known, 200), merged);
        assert!(merged.merged(&known, 1000).revoked.is_empty());
    }

    #[test]
    fn a_full_list_still_learns_more_of_what_it_has() {
        let hosts: Vec<_> =
            (0..MOST_REVOKED).map(|it| (Revoked::Host(format!("host{it}")), 100)).collect();
        let known = list(MOST_REVOKED as u64, &hosts);
        let mut later = list(1, &[(Revoked::Host("host7".into()), 150)]);
        later.revoked[0].number = MOST_REVOKED as u64 + 1;
        let merged = known.merged(&later, 200);
        assert_eq!(merged.revoked.len(), MOST_REVOKED);
        assert_eq!(merged.revoked.last(), later.revoked.last());
        let other = list(1, &[(Revoked::Host("other".into()), 150)]);
        assert_eq!(known.merged(&other, 200).revoked, known.revoked);
    }

    #[test]
    fn connections_end_when_their_certificate_is_revoked() {
        let (revocations, other) = (Revocations::default(), Revocations::default());
        revocations.tell(&other, 0);
        let ended = Arc::new(AtomicBool::new(false));
        let end = |flag: &Arc<AtomicBool>| {
            let flag = flag.clone();
            move || flag.store(true, Ordering::Relaxed)
        };
        let gamma = certified(Subject::Node("gamma".into()), 1);
        let kept = Arc::new(AtomicBool::new(false));
        let _gamma = revocations.watch(gamma, end(&kept)).unwrap();
        let gone = Arc::new(AtomicBool::new(false));
        drop(other.watch(beta(1), end(&gone)).unwrap());
        let _beta = other.watch(beta(1), end(&ended)).unwrap();
        assert!(revocations.learn(&list(1, &[(Revoked::Host("beta".into()), 5)]), 10));
        assert!(!revocations.learn(&list(1, &[(Revoked::Host("beta".into()), 5)]), 10));
        let has_ended = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        assert!(has_ended(&ended) && !has_ended(&kept) && !has_ended(&gone));
        let refused = other.watch(beta(1), || {}).unwrap_err().to_string();
        assert!(refused.contains("of beta.node.rackbus was revoked"), "{refused}");
        assert!(other.watch(beta(6), || {}).is_ok());
    }

    #[test]
    fn what_is_ended_may_drop_what_watches_it_and_ask_again() {
        let (first, second) = (Revocations::default(), Revocations::default());
        first.tell(&second, 0);
        let (done, ended) = std::sync::mpsc::channel();
        // In a thread of its own: a lock that is taken twice fails this test instead of stopping it.
        std::thread::spawn(move || {
            for of in [&first, &second] {
                let held: Arc<Mutex<Option<WatchedConnection>>> = Arc::default();
                let (own, asked, all) = (held.clone(), of.clone(), first.clone());
                let done = done.clone();
                let end = move || {
                    drop(own.lock().unwrap().take());
                    assert!(asked.check(&beta(1)).is_err() && all.check(&beta(1)).is_err());
                    done.send("ended").unwrap();
                };
                *held.lock().unwrap() = Some(of.watch(beta(1), end).unwrap());
            }
            first.learn(&list(1, &[(Revoked::Host("beta".into()), 5)]), 10);
            done.send("learned").unwrap();
        });
        let limit = std::time::Duration::from_secs(60);
        let told: Vec<_> = (0..3).map(|_| ended.recv_timeout(limit).unwrap()).collect();
        assert_eq!(told, ["ended", "ended", "learned"]);
    }
}
