//! How long a rack of three control planes over etcd cannot change anything when the leader is killed, against an election
//! by etcd alone.
//!
//! Whoever is elected by etcd has a key that is bound to a lease of so many seconds, and is followed when that has ended. The
//! bare election is two such candidates in this process, of which the second asks every [`LOOK`].

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::etcd::{
    Cluster, Compare, EtcdClient, EtcdEndpoint, EtcdLease, EtcdOperation, Txn,
};
use rackbus_identity::{Person, Role, Subject};

use super::failed;
use super::network::free_address;
use super::parts::{RunningPart, etcd, first_authority, shown};
use crate::BenchError;
use crate::rack::BenchRack;

/// The name of the rack, and of its folder.
const RACK: &str = "failover";
/// Seconds that whoever leads keeps the leadership without renewing it, as `--leader-ttl` has them.
const TTL: u64 = 3;
/// How often whoever leads renews: as a control plane does.
const RENEW: Duration = Duration::from_millis(750);
/// How often who is to follow asks.
const LOOK: Duration = Duration::from_millis(10);
/// How long a change, or an election, may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// One of the control planes.
struct Candidate {
    dir: PathBuf,
    address: String,
    running: Option<RunningPart>,
}

/// Three control planes and what they share.
pub(super) struct Failover {
    program: PathBuf,
    rack: PathBuf,
    candidates: Vec<Candidate>,
    client: ControlClient,
    store: String,
    runtime: tokio::runtime::Runtime,
    runs: u64,
    _etcd: RunningPart,
}

impl Failover {
    /// Starts them in `dir`; `None` where there is no `rackbus` or no etcd.
    ///
    /// # Errors
    /// When none of them leads.
    pub(super) fn start(dir: &Path) -> Result<Option<Failover>, BenchError> {
        let Some(program) = BenchRack::find() else { return Ok(None) };
        let dir = dir.join(RACK);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).map_err(BenchError::io("making the rack's folder"))?;
        let Some((running, store)) = etcd(&dir)? else { return Ok(None) };
        let rack = dir.join("rack.toml");
        std::fs::write(&rack, format!("name = \"{RACK}\"\n[hosts.alpha]\n"))
            .map_err(BenchError::io("writing the rack file"))?;
        let mut candidates = Vec::new();
        for name in ["c0", "c1", "c2"] {
            let (dir, address) = (dir.join(name), free_address()?);
            candidates.push(Candidate { dir, address, running: None });
        }
        // The first that leads brings its authority along, and the others take that from etcd.
        let authority = first_authority(&candidates[0].dir.join("state"), RACK)?;
        let person = Person { user: "bench".to_owned(), role: Role::Administrator };
        let shown = shown(&authority, Subject::Person(person))?;
        let addresses: Vec<String> = candidates.iter().map(|it| it.address.clone()).collect();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(BenchError::io("starting a runtime"))?;
        let client = ControlClient::with_tls(&addresses, shown);
        let (runs, _etcd) = (0, running);
        let mut failover =
            Failover { program, rack, candidates, client, store, runtime, runs, _etcd };
        failover.begin(0)?;
        failover.changed()?;
        failover.begin(1)?;
        failover.begin(2)?;
        Ok(Some(failover))
    }

    fn begin(&mut self, nth: usize) -> Result<(), BenchError> {
        let candidate = &mut self.candidates[nth];
        std::fs::create_dir_all(&candidate.dir).map_err(BenchError::io("making a folder"))?;
        let log = candidate.dir.join("log");
        let log = std::fs::File::options().create(true).append(true).open(log);
        let mut command = Command::new(&self.program);
        command.arg("--run-dir").arg(candidate.dir.join("run")).arg("control").arg(&self.rack);
        command.arg("--state-dir").arg(candidate.dir.join("state"));
        command.args(["--listen", &candidate.address, "--store", "etcd", "--etcd", &self.store]);
        command.args(["--leader-ttl", &TTL.to_string()]);
        command.stderr(log.map_err(BenchError::io("making a log"))?);
        candidate.running = Some(RunningPart::start(&mut command)?);
        Ok(())
    }

    /// Makes a change, as soon as a control plane takes one.
    fn changed(&self) -> Result<(), BenchError> {
        let begun = Instant::now();
        self.runtime.block_on(async {
            loop {
                match self.client.token("alpha", Duration::from_secs(60)).await {
                    Ok(_) => return Ok(()),
                    Err(error) if begun.elapsed() > PATIENCE => return Err(failed(error)),
                    Err(_) => tokio::time::sleep(LOOK).await,
                }
            }
        })
    }

    /// The number of the control plane that leads now.
    fn leader(&self) -> Result<usize, BenchError> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            for (nth, candidate) in self.candidates.iter().enumerate() {
                let asked = ControlClient::new(&candidate.dir.join("run").join("control.sock"));
                if self.runtime.block_on(asked.control()).is_ok_and(|it| it.leads) {
                    return Ok(nth);
                }
            }
            std::thread::sleep(LOOK);
        }
        Err(failed("no control plane leads"))
    }

    /// Milliseconds from when the leader is killed to the first change that another one has made.
    pub(super) fn run(&mut self) -> Result<f64, BenchError> {
        let leader = self.leader()?;
        self.changed()?;
        drop(self.candidates[leader].running.take());
        let killed = Instant::now();
        self.changed()?;
        let took = killed.elapsed().as_secs_f64() * 1e3;
        self.begin(leader)?;
        Ok(took)
    }

    /// Milliseconds from when a candidate that was elected by etcd ends to renew, to the election of another one.
    pub(super) fn elect(&mut self) -> Result<f64, BenchError> {
        let endpoint: EtcdEndpoint = self.store.parse().map_err(failed)?;
        let cluster = Cluster::new(vec![endpoint], None).map_err(failed)?;
        self.runs += 1;
        let key = format!("election/{}", self.runs);
        let (mut one, mut other) = (cluster.client(PATIENCE), cluster.client(PATIENCE));
        self.runtime.block_on(async {
            let (lease, _) = one.grant(TTL).await.map_err(failed)?;
            if !stand(&mut one, &key, lease).await? {
                return Err(failed("nobody was elected before, and somebody is"));
            }
            let (next, _) = other.grant(10 * TTL).await.map_err(failed)?;
            for _ in 0..2 {
                tokio::time::sleep(RENEW).await;
                one.renew(lease).await.map_err(failed)?;
            }
            tokio::time::sleep(in_renewal(self.runs)).await;
            let ended = Instant::now();
            while !stand(&mut other, &key, next).await? {
                if ended.elapsed() > PATIENCE {
                    return Err(failed("nobody follows"));
                }
                tokio::time::sleep(LOOK).await;
            }
            let took = ended.elapsed().as_secs_f64() * 1e3;
            other.revoke(next).await.map_err(failed)?;
            Ok(took)
        })
    }
}

/// How long after a renewal whoever is elected ends in this run: one part of the time between two after the other.
fn in_renewal(run: u64) -> Duration {
    RENEW / 5 * u32::try_from(run % 5).unwrap_or(0)
}

/// Whether the candidate is elected by now.
async fn stand(etcd: &mut EtcdClient, key: &str, lease: EtcdLease) -> Result<bool, BenchError> {
    let put = EtcdOperation::Put { key: key.into(), value: "leads".into(), lease: Some(lease) };
    let compares = vec![Compare::Created(key.to_owned(), 0)];
    let txn = Txn { compares, then: vec![put], otherwise: Vec::new() };
    Ok(etcd.txn(&txn).await.map_err(failed)?.succeeded)
}
