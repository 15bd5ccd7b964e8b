//! Which hosts come and go with a changed rack file, and what that asks of the nodes of this machine.

use std::collections::BTreeSet;

use super::changes::{ChangeKind, ChangedPart, FileChange};

/// The hosts of a rack before and after, and what is known of its nodes.
#[derive(Debug, Clone, Copy)]
pub struct HostsKnown<'a> {
    /// Those that the control plane knows.
    pub before: &'a BTreeSet<String>,
    /// Those of the file.
    pub after: &'a BTreeSet<String>,
    /// Those whose nodes run.
    pub living: &'a BTreeSet<String>,
    /// Those whose nodes were noted to be of an earlier file, or not started yet, by an `up` that did not end.
    pub behind: &'a BTreeSet<String>,
}

/// Which hosts come and go, and what is to be done with nodes for that.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HostChanges {
    /// Hosts that the file has no more.
    pub left: BTreeSet<String>,
    /// Hosts that it has for the first time.
    pub joined: BTreeSet<String>,
    /// Hosts whose nodes go on with the new file.
    pub followed: BTreeSet<String>,
    /// Hosts whose nodes are to be started.
    pub started: BTreeSet<String>,
    /// Hosts whose nodes are to end.
    pub ended: BTreeSet<String>,
}

impl HostChanges {
    /// What leads from the hosts before to those after. Each node knows all hosts, so all go on anew where one comes or
    /// goes; one that does not run reads the file when it is started.
    pub fn between(known: HostsKnown<'_>) -> HostChanges {
        let HostsKnown { before, after, living, behind } = known;
        let of = |hosts: &BTreeSet<String>, holds: &dyn Fn(&String) -> bool| -> BTreeSet<String> {
            hosts.iter().filter(|host| holds(host)).cloned().collect()
        };
        let left = of(before, &|host| !after.contains(host));
        let joined = of(after, &|host| !before.contains(host));
        let changes = !(left.is_empty() && joined.is_empty());
        let followed =
            of(living, &|host| after.contains(host) && (changes || behind.contains(host)));
        let started = of(after, &|host| {
            !living.contains(host) && (joined.contains(host) || behind.contains(host))
        });
        let ended = of(living, &|host| !after.contains(host));
        HostChanges { left, joined, followed, started, ended }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == HostChanges::default()
    }

    /// The hosts that are not in the rack any more, or not from now on.
    pub fn gone(&self) -> BTreeSet<String> {
        self.left.union(&self.ended).cloned().collect()
    }

    /// Which of the nodes that run now have been started since these changes were found, where all nodes go on anew.
    pub fn late(&self, living: &BTreeSet<String>) -> BTreeSet<String> {
        let changes = !(self.left.is_empty() && self.joined.is_empty());
        let is_known = |host: &String| {
            [&self.followed, &self.started, &self.left, &self.ended]
                .iter()
                .any(|it| it.contains(host))
        };
        living.iter().filter(|host| changes && !is_known(host)).cloned().collect()
    }

    /// The nodes that have something to do before the rack is as its file says.
    pub fn behind(&self) -> Vec<String> {
        self.followed.union(&self.started).cloned().collect()
    }

    /// What is shown of it.
    pub fn all(&self) -> Vec<FileChange> {
        let host = |name: &String, change| FileChange {
            part: ChangedPart::Host,
            name: name.clone(),
            change,
        };
        let left = self.left.iter().map(|name| host(name, ChangeKind::Removed));
        left.chain(self.joined.iter().map(|name| host(name, ChangeKind::Added))).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(hosts: &[&str]) -> BTreeSet<String> {
        hosts.iter().map(|host| (*host).to_owned()).collect()
    }

    #[test]
    fn a_host_that_comes_has_all_nodes_go_on_anew() {
        let (before, after) = (named(&["a", "b"]), named(&["b", "c"]));
        let living = before.clone();
        let known =
            HostsKnown { before: &before, after: &after, living: &living, behind: &named(&[]) };
        let changes = HostChanges::between(known);
        let shown: Vec<_> = changes.all().into_iter().map(|it| (it.name, it.change)).collect();
        assert_eq!(
            shown,
            [("a".to_owned(), ChangeKind::Removed), ("c".to_owned(), ChangeKind::Added)]
        );
        assert_eq!(changes.followed, named(&["b"]));
        assert_eq!((&changes.started, &changes.ended), (&named(&["c"]), &named(&["a"])));
        // One that was started meanwhile has read the file of before.
        assert_eq!(changes.late(&named(&["a", "b", "c"])), named(&[]));
        // A node that somebody ended stays so, or follows where somebody has started it meanwhile.
        let (more, all) = (named(&["a", "b", "c"]), named(&["a", "b"]));
        let one = HostsKnown { before: &all, after: &more, living: &named(&["a"]), ..known };
        assert_eq!(HostChanges::between(one).followed, named(&["a"]));
        assert_eq!(HostChanges::between(one).late(&more), named(&["b"]));
        let known = HostsKnown { before: &before, after: &before, living: &named(&["a"]), ..known };
        assert!(HostChanges::between(known).is_empty());
    }

    fn hosts() -> impl Strategy<Value = BTreeSet<String>> {
        prop::collection::btree_set("[a-e]", 0..5)
    }

    proptest! {
        /// Wherever an earlier one ended: what it has noted and what runs says what is left to do.
        #[test]
        fn after_all_steps_or_some_of_them_the_rest_leads_to_the_file(
            before in hosts(), after in hosts(), running in hosts(), done in hosts(),
        ) {
            let mut living: BTreeSet<String> = running.intersection(&before).cloned().collect();
            let nothing = BTreeSet::new();
            let known =
                HostsKnown { before: &before, after: &after, living: &living, behind: &nothing };
            let first = HostChanges::between(known);
            prop_assert!(first.followed.is_disjoint(&first.started));
            prop_assert!(first.ended.is_disjoint(&after));
            // It was killed on its way: the control plane knows the new hosts, some nodes have done their steps.
            let mut behind: BTreeSet<String> = first.behind().into_iter().collect();
            behind.retain(|host| !done.contains(host));
            living.extend(first.started.intersection(&done).cloned());
            living.retain(|host| !(first.ended.contains(host) && done.contains(host)));
            let known =
                HostsKnown { before: &after, after: &after, living: &living, behind: &behind };
            let rest = HostChanges::between(known);
            prop_assert_eq!(rest.followed.union(&rest.started).cloned().collect::<BTreeSet<_>>(), behind);
            living.extend(rest.started);
            living.retain(|host| !rest.ended.contains(host));
            prop_assert!(living.is_subset(&after));
            let known =
                HostsKnown { before: &after, after: &after, living: &living, behind: &nothing };
            prop_assert!(HostChanges::between(known).is_empty());
        }
    }
}
