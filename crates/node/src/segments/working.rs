//! Copying and emptying memory beside all else: it may be gigabytes, and of a thousand segments at once. A few threads do it,
//! one piece after the other: more would not be faster, and the system has threads for so many only.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_memory::sparse;
use rackbus_segment::Handle;

use super::Segments;
use super::objects::Object;
use crate::sequencer::essential_thread;

/// Threads that work at once, at most.
const MOST: usize = 4;

/// A piece of work.
type Job = Box<dyn FnOnce() + Send>;

/// What is to be done, and how many threads do it now.
#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    working: usize,
}

/// Threads that there are as long as there is something to do.
#[derive(Clone, Default)]
pub(super) struct Workers(Arc<Mutex<Queue>>);

impl Workers {
    /// Has it done soon, in the order of asking if there is a thread for each.
    ///
    /// # Errors
    /// When there is no thread that does it, and none can be had; it is not done then.
    fn run(&self, job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let mut queue = self.lock();
        queue.jobs.push_back(Box::new(job));
        if queue.working >= MOST {
            return Ok(());
        }
        let workers = self.clone();
        match essential_thread("move", move || workers.work()) {
            Ok(()) => queue.working += 1,
            // Those who work do it.
            Err(_) if queue.working > 0 => {}
            Err(error) => {
                queue.jobs.pop_back();
                return Err(error);
            }
        }
        Ok(())
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            job();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        let job = queue.jobs.pop_front();
        if job.is_none() {
            queue.working -= 1;
        }
        job
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Empties a range of memory now.
pub(super) fn empty(object: &Object, offset: u64, length: u64) -> Result<(), String> {
    // What its last page has beyond the end belongs to no segment.
    let length = length.next_multiple_of(4096);
    sparse::empty(&**object.fd(), offset, length).map_err(|error| {
        tracing::error!(%error, "memory that was taken away could not be emptied");
        error.to_string()
    })
}

impl Segments {
    /// Copies beside all else, and tells the directory.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub(super) fn copy(
        self: &Arc<Self>,
        ticket: Handle,
        (from, to): ((Arc<Object>, u64), (Arc<Object>, u64)),
        length: u64,
    ) -> std::io::Result<()> {
        let service = self.clone();
        self.workers.run(move || {
            let (source, target) = (&**from.0.fd(), &**to.0.fd());
            let outcome = sparse::copy_sparse((source, from.1), (target, to.1), length);
            let outcome = outcome.map_err(|error| error.to_string());
            service.ask(|directory, now, objects| directory.copied(now, ticket, outcome, objects));
        })
    }

    /// Empties beside all else, and tells the directory.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub(super) fn empty_aside(
        self: &Arc<Self>,
        job: Handle,
        object: Arc<Object>,
        offset: u64,
        length: u64,
    ) -> std::io::Result<()> {
        let service = self.clone();
        self.workers.run(move || {
            let outcome = empty(&object, offset, length);
            service.ask(|directory, now, objects| directory.emptied(now, job, outcome, objects));
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use rackbus_fabric::FabricHandle;
    use rackbus_link::shm::ShmLink;
    use rackbus_segment::Objects;
    use rackbus_segment::directory::{DirectorySettings, HostRange};

    use super::*;

    fn service() -> Arc<Segments> {
        let range = HostRange { base: 1 << 32, size: 1 << 30 };
        let hosts = [(4, "alpha".to_owned())].into();
        let (ranges, rules) = (vec![(4, range)], Default::default());
        let settings = DirectorySettings { node: 4, hosts, range, ranges, rules, machines: false };
        let fabric = FabricHandle::of_hosts(["alpha"]).unwrap();
        let link = ShmLink::new("test", std::path::Path::new("/nowhere"), ["alpha"]);
        Segments::new("test", "alpha", Arc::new(link), settings, fabric)
    }

    /// Threads of this process that move or empty memory.
    fn threads() -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| ["move", "empty"].contains(&name.trim())).count()
    }

    #[test]
    fn many_segments_are_moved_by_few_threads() {
        const MANY: u64 = 500;
        let service = service();
        {
            let mut state = service.lock();
            let mut memory = || {
                let id = state.store.memory(4096).unwrap();
                state.store.get(id).unwrap().clone()
            };
            let memories = [memory(), memory()];
            // Nobody can tell the directory meanwhile that it is done.
            for ticket in 0..MANY {
                let ends = ((memories[0].clone(), 0), (memories[1].clone(), 0));
                service.copy(Handle(ticket), ends, 4096).unwrap();
                let object = memories[0].clone();
                service.empty_aside(Handle(MANY + ticket), object, 0, 4096).unwrap();
            }
            // A thread has its name a little after it was started.
            let begun = Instant::now();
            while threads() == 0 {
                assert!(begun.elapsed() < Duration::from_secs(60), "nobody works");
            }
            std::thread::sleep(Duration::from_millis(100));
            let most = threads();
            assert!(most <= 16, "{most} threads");
        }
        let (done, all) = mpsc::channel();
        service.workers.run(move || done.send(()).unwrap()).unwrap();
        all.recv_timeout(Duration::from_secs(60)).expect("all are moved");
    }

    #[test]
    fn all_is_done_and_each_once() {
        let workers = Workers::default();
        let (done, all) = mpsc::channel();
        for number in 0..1000 {
            let done = done.clone();
            workers.run(move || done.send(number).unwrap()).unwrap();
        }
        drop(done);
        let mut numbers: Vec<u32> = all.iter().collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000));
    }
}
