//! `rackbus control migrate`, `backup` and `restore`: the rack's state as a whole.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rackbus_control::etcd::{ClusterError, EtcdClient, EtcdEndpoint};
use rackbus_control::store::snapshot::{Snapshot, SnapshotError};
use rackbus_control::store::{Keys, LeaderKeyHold, Sqlite};
use serde_json::json;

use super::cluster::EtcdArgs;
use crate::Common;
use crate::output::{Failure, Output};
use crate::{paths, process};

/// How long a request to etcd may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A store: `sqlite:PATH` or `etcd:URL,…`.
#[derive(Debug, Clone)]
pub enum StoreAddress {
    /// A file, or the state directory that it is in.
    Sqlite(PathBuf),
    /// The members of a cluster.
    Etcd(Vec<EtcdEndpoint>),
}

impl FromStr for StoreAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<StoreAddress, String> {
        match text.split_once(':') {
            Some(("sqlite", path)) if !path.is_empty() => Ok(StoreAddress::Sqlite(path.into())),
            Some(("etcd", members)) => {
                let members = members.split(',').map(str::parse).collect::<Result<Vec<_>, _>>();
                members.map(StoreAddress::Etcd).map_err(|error: ClusterError| error.to_string())
            }
            _ => Err("a store is `sqlite:PATH` or `etcd:https://HOST:2379,…`".to_owned()),
        }
    }
}

impl std::fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StoreAddress::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            StoreAddress::Etcd(members) => {
                let members: Vec<String> = members.iter().map(ToString::to_string).collect();
                write!(f, "etcd:{}", members.join(","))
            }
        }
    }
}

/// Take the rack's state from one store to another. The one that it was in is not used any more.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control migrate --from sqlite:/var/lib/rackbus/lab/control.db --to etcd:https://e1:2379,https://e2:2379 --etcd-ca ca.pem
  rackbus --rack lab control migrate --from etcd:https://e1:2379 --etcd-ca ca.pem --to sqlite:/var/lib/rackbus/lab/control.db

All control planes of the rack are stopped meanwhile; what is borrowed is not disturbed.")]
pub struct MigrateArgs {
    /// Where the state is: `sqlite:PATH` or `etcd:URL,…`.
    #[arg(long, value_name = "STORE")]
    from: StoreAddress,
    /// Where it is to be.
    #[arg(long, value_name = "STORE")]
    to: StoreAddress,
    #[command(flatten)]
    etcd: EtcdArgs,
}

/// Write the rack's state to a file, also while control planes run.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control backup lab.backup
  rackbus --rack lab control backup lab.backup --from etcd:https://e1:2379,https://e2:2379 --etcd-ca ca.pem

The file has the key of the rack's certificate authority: it is as secret as the rack.")]
pub struct BackupArgs {
    /// The file; only its owner can read it.
    file: PathBuf,
    /// Where the state is; the file of the rack that runs on this machine unless named.
    #[arg(long, value_name = "STORE")]
    from: Option<StoreAddress>,
    #[command(flatten)]
    etcd: EtcdArgs,
}

/// Put the state of a backup into a store, in the place of what is there.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control restore lab.backup --to sqlite:/var/lib/rackbus/lab/control.db
  rackbus control restore lab.backup --to etcd:https://e1:2379,https://e2:2379 --etcd-ca ca.pem

All control planes of the rack are stopped meanwhile. Numbers of leases and epochs go on well above those of the
backup; leases that were made after it end, those that ended after it end again.")]
pub struct RestoreArgs {
    /// The file that `rackbus control backup` has written.
    file: PathBuf,
    /// Where the state is to be.
    #[arg(long, value_name = "STORE")]
    to: StoreAddress,
    #[command(flatten)]
    etcd: EtcdArgs,
}

impl MigrateArgs {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let _held = (hold(&self.from)?, hold(&self.to)?);
        if self.from.to_string() == self.to.to_string() {
            return Err(Failure::usage(
                "the state is there already",
                "name another store with --to",
            ));
        }
        let snapshot = match &self.from {
            StoreAddress::Sqlite(path) => self.out_of_sqlite(&file_of(path)).await?,
            StoreAddress::Etcd(members) => self.out_of_etcd(members, common).await?,
        };
        let moved = put(&snapshot, &self.to, &self.etcd, false).await;
        moved.map_err(|failure| Failure {
            remedy: "see to the cause and say it again: the state is read from where it was"
                .to_owned(),
            ..failure
        })?;
        let (records, events) = snapshot.summary();
        let (from, to) = (self.from.to_string(), self.to.to_string());
        let moved = json!({ "rack": snapshot.rack, "from": from, "to": to, "records": records, "events": events });
        output.result(&moved, |o| {
            o.line(&format!(
                "the state of rack {} ({records} records) has moved to {to}",
                snapshot.rack
            ));
        });
        Ok(())
    }
}

impl MigrateArgs {
    /// Reads the state. From then on nobody begins with it: two stores would both give out epochs.
    async fn out_of_sqlite(&self, path: &Path) -> Result<Snapshot, Failure> {
        let to = self.to.to_string();
        let snapshot = Snapshot::of_sqlite(path, Some(&to)).map_err(failed)?;
        check(&snapshot, &self.to, &self.etcd).await?;
        let left = Sqlite::open_any(path, &snapshot.rack).and_then(|mut it| it.leave(&to));
        left.map_err(|error| failed(error.into()))?;
        Ok(snapshot)
    }

    /// The same. Nobody leads between the reading and that.
    async fn out_of_etcd(
        &self,
        members: &[EtcdEndpoint],
        common: &Common,
    ) -> Result<Snapshot, Failure> {
        let to = self.to.to_string();
        let (mut etcd, keys) = (client(&self.etcd, members)?, keys(&self.etcd, common)?);
        let held = LeaderKeyHold::take(&mut etcd, &keys).await.map_err(failed)?;
        let read = async {
            let snapshot = Snapshot::of_etcd(&mut etcd, &keys, Some(&to)).await.map_err(failed)?;
            check(&snapshot, &self.to, &self.etcd).await?;
            held.leave(&mut etcd, &to).await.map_err(failed)?;
            Ok(snapshot)
        };
        let read = read.await;
        held.release(&mut etcd).await;
        read
    }
}

impl BackupArgs {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let from = match &self.from {
            Some(from) => from.clone(),
            None => {
                let running = paths::running(&paths::find_run_dir(common)?)?;
                StoreAddress::Sqlite(running.state_dir.join("control.db"))
            }
        };
        let snapshot = read(&from, &self.etcd, common).await?;
        snapshot.write(&self.file).map_err(failed)?;
        let (records, events) = snapshot.summary();
        let file = self.file.display().to_string();
        let done =
            json!({ "rack": snapshot.rack, "file": file, "records": records, "events": events });
        output.result(&done, |o| {
            let rack = &snapshot.rack;
            o.line(&format!(
                "{file} has the state of rack {rack}: {records} records, {events} events"
            ));
        });
        Ok(())
    }
}

impl RestoreArgs {
    pub async fn run(&self, output: &Output) -> Result<(), Failure> {
        let _held = hold(&self.to)?;
        let snapshot = Snapshot::read(&self.file).map_err(failed)?.ahead();
        put(&snapshot, &self.to, &self.etcd, true).await?;
        let (records, events) = snapshot.summary();
        let (rack, to) = (&snapshot.rack, self.to.to_string());
        let done = json!({ "rack": rack, "to": to, "records": records, "events": events });
        output.result(&done, |o| {
            o.line(&format!(
                "{to} has the state of rack {rack}: {records} records, {events} events"
            ));
        });
        Ok(())
    }
}

/// The database, where its folder is named.
fn file_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("control.db") } else { path.to_owned() }
}

/// Keeps a control plane from being started on a file meanwhile; etcd does that by its leader's key.
fn hold(place: &StoreAddress) -> Result<Option<std::fs::File>, Failure> {
    let StoreAddress::Sqlite(path) = place else { return Ok(None) };
    let file = file_of(path);
    let folder = file.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    paths::make_private(folder)?;
    let held = process::hold(&folder.join(process::STATE_LOCK), |holder| {
        let pid = holder.map_or("another process".to_owned(), |pid| format!("process {pid}"));
        let error = format!("the state in {} is in use by {pid}", folder.display());
        Failure::new(error, "stop the control plane first")
    });
    held.map(Some)
}

fn client(args: &EtcdArgs, members: &[EtcdEndpoint]) -> Result<EtcdClient, Failure> {
    Ok(args.with_members(members).cluster()?.client(PATIENCE))
}

/// Where the keys are of a rack of which nothing was read yet.
fn keys(args: &EtcdArgs, common: &Common) -> Result<Keys, Failure> {
    match (&common.rack, args.has_prefix()) {
        (Some(rack), _) => Ok(args.keys(rack)),
        (None, true) => Ok(args.keys("")),
        (None, false) => {
            let remedy = "name it with `rackbus --rack NAME …`, or its keys with --etcd-prefix";
            Err(Failure::usage("which rack's state is meant is not known", remedy))
        }
    }
}

async fn read(place: &StoreAddress, args: &EtcdArgs, common: &Common) -> Result<Snapshot, Failure> {
    match place {
        StoreAddress::Sqlite(path) => Snapshot::of_sqlite(&file_of(path), None).map_err(failed),
        StoreAddress::Etcd(members) => {
            let (mut etcd, keys) = (client(args, members)?, keys(args, common)?);
            Snapshot::of_etcd(&mut etcd, &keys, None).await.map_err(failed)
        }
    }
}

/// Whether the state may be put there.
async fn check(snapshot: &Snapshot, place: &StoreAddress, args: &EtcdArgs) -> Result<(), Failure> {
    let checked = match place {
        StoreAddress::Sqlite(path) => snapshot.check_sqlite(&file_of(path), false),
        StoreAddress::Etcd(members) => {
            let keys = args.keys(&snapshot.rack);
            snapshot.check_etcd(&mut client(args, members)?, &keys, false).await
        }
    };
    checked.map(drop).map_err(failed)
}

async fn put(
    snapshot: &Snapshot,
    place: &StoreAddress,
    args: &EtcdArgs,
    replace: bool,
) -> Result<(), Failure> {
    match place {
        StoreAddress::Sqlite(path) => snapshot.put_sqlite(&file_of(path), replace).map_err(failed),
        StoreAddress::Etcd(members) => {
            let keys: Keys = args.keys(&snapshot.rack);
            let put = snapshot.put_etcd(&mut client(args, members)?, &keys, replace).await;
            put.map_err(failed)
        }
    }
}

fn failed(error: SnapshotError) -> Failure {
    let remedy = match &error {
        SnapshotError::Occupied(_) => "`rackbus control restore` puts a backup in its place",
        SnapshotError::Nothing(_) | SnapshotError::OtherRack { .. } => "name the rack's own store",
        SnapshotError::HasLeader(_) | SnapshotError::Interrupted => "nothing was changed",
        SnapshotError::Incomplete => "do it again, when etcd answers faster",
        _ => "see to the cause, and do it again",
    };
    Failure::new(error.to_string(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_a_file_or_the_members_of_a_cluster() {
        for place in ["sqlite:/var/lib/lab/control.db", "etcd:https://e1:2379,https://e2:2379"] {
            assert_eq!(place.parse::<StoreAddress>().unwrap().to_string(), place);
        }
        for wrong in
            ["/var/lib/lab", "sqlite:", "etcd:e1:2379", "mysql:x", "etcd:http://10.0.0.1:2379"]
        {
            assert!(wrong.parse::<StoreAddress>().is_err(), "{wrong}");
        }
    }
}
