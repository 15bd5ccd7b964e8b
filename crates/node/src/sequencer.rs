//! Jobs that run beside the agent, in order where that matters, and threads that the node cannot do without.

use std::collections::HashMap;
use std::hash::Hash;
use std::panic::AssertUnwindSafe;

use tokio::task::JoinHandle;

/// Runs jobs beside, one after the other for each key.
#[derive(Debug)]
pub struct Sequencer<K> {
    /// The last job of each key, which waits for those before it. Not bounded here: the lending protocol asks for the
    /// next step of a lease or a device when it has heard of the last one.
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

/// Starts a thread that the node cannot do without: where it panics the process ends, as for [`essential`] work.
///
/// # Errors
/// When the system has no thread left.
pub fn essential_thread(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let guarded = move || {
        if std::panic::catch_unwind(AssertUnwindSafe(work)).is_err() {
            tracing::error!("a thread of the node failed; the process ends");
            std::process::abort();
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(guarded).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VICTIM: &str = "RACKBUS_AGENT_VICTIM";

    /// Runs the test of this name as a process of its own; whether that ended in order.
    fn survives(test: &str) -> bool {
        let name = format!("sequencer::tests::{test}");
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap());
        victim.args(["--exact", &name]).env(VICTIM, "1").output().unwrap().status.success()
    }

    #[test]
    fn a_thread_that_fails_ends_the_process() {
        if std::env::var_os(VICTIM).is_some() {
            essential_thread("time", || panic!("a fault in the directory")).unwrap();
            return std::thread::sleep(std::time::Duration::from_secs(60));
        }
        assert!(!survives("a_thread_that_fails_ends_the_process"), "nothing is ever done again");
    }

    /// The test runs itself as the process that ends.
    #[test]
    fn a_job_that_fails_ends_the_process() {
        if std::env::var_os(VICTIM).is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut jobs = Sequencer::default();
                jobs.run("nvme0", || panic!("a fault in the device model"));
                jobs.last.remove("nvme0").unwrap().await.unwrap();
            });
            return;
        }
        assert!(!survives("a_job_that_fails_ends_the_process"), "it goes on, and revokes for ever");
    }
}
