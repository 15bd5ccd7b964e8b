//! Jobs that run beside the agent, in order where that matters.

use std::collections::HashMap;
use std::hash::Hash;

use tokio::task::JoinHandle;

/// Runs jobs beside, one after the other for each key.
#[derive(Debug)]
pub struct Sequencer<K> {
    last: HashMap<K, JoinHandle<()>>,
}

impl<K> Default for Sequencer<K> {
    fn default() -> Self {
        Sequencer { last: HashMap::new() }
    }
}

impl<K: Hash + Eq> Sequencer<K> {
    /// Whether all jobs have ended.
    pub fn is_idle(&self) -> bool {
        self.last.values().all(JoinHandle::is_finished)
    }

    /// Runs `job` when those before it that have the same `key` have ended.
    pub fn run(&mut self, key: K, job: impl FnOnce() + Send + 'static) {
        self.last.retain(|_, job| !job.is_finished());
        let before = self.last.remove(&key);
        let task = tokio::spawn(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            essential(tokio::task::spawn_blocking(job)).await;
        });
        self.last.insert(key, task);
    }
}

/// Waits for something that the node cannot do without. Where it failed, nobody would ever hear that
/// it is done: the process ends, and its next life, which has nothing mapped, is safe.
pub async fn essential(work: JoinHandle<()>) {
    if let Err(error) = work.await
        && error.is_panic()
    {
        tracing::error!(%error, "a job of the node failed; the process ends");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test runs itself as the process that ends.
    #[test]
    fn a_job_that_fails_ends_the_process() {
        const VICTIM: &str = "RACKBUS_AGENT_VICTIM";
        if std::env::var_os(VICTIM).is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut jobs = Sequencer::default();
                jobs.run("nvme0", || panic!("a fault in the device model"));
                jobs.last.remove("nvme0").unwrap().await.unwrap();
            });
            return;
        }
        let name = "sequencer::tests::a_job_that_fails_ends_the_process";
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap());
        let ended = victim.args(["--exact", name]).env(VICTIM, "1").output().unwrap();
        assert!(!ended.status.success(), "it goes on, and revokes for ever");
    }
}
