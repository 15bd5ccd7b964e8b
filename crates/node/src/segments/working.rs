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

/// Threads that do what may take long, at most: what takes a moment waits for none of that.
const MOST_LONG: usize = MOST - 1;

/// A copy of more bytes takes long.
const SHORT: u64 = 64 << 20;

/// A piece of work.
type Job = Box<dyn FnOnce() + Send>;

/// How a piece of work stands to others: what comes first is done first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Urgency {
    /// A copy that takes a moment. Who writes to the memory stands still meanwhile.
    Short,
    /// A copy that takes longer.
    Long,
    /// Nobody stands still for it.
    Later,
}

/// What is to be done, and how many threads do it now.
#[derive(Default)]
struct Queue {
    /// By [`Urgency`]. Not bounded here: a segment is moved by one copy at a time, and a range of memory that is to be emptied
    /// is given to nobody before it is, so the directory's bounds hold for both.
    jobs: [VecDeque<Job>; 3],
    working: usize,
    /// As many of those do what may take long.
    long: usize,
}

impl Queue {
    /// What is done next, and whether it may take long.
    fn take(&mut self) -> Option<(Job, bool)> {
        let [short, long, later] = &mut self.jobs;
        if let Some(job) = short.pop_front() {
            return Some((job, false));
        }
        if self.long >= MOST_LONG {
            return None;
        }
        let job = long.pop_front().or_else(|| later.pop_front())?;
        self.long += 1;
        Some((job, true))
    }
}

/// Threads that there are as long as there is something to do.
#[derive(Clone, Default)]
pub(super) struct Workers(Arc<Mutex<Queue>>);

impl Workers {
    /// Has it done soon, in the order of asking among what is as urgent, if there is a thread for each.
    ///
    /// # Errors
    /// When there is no thread that does it, and none can be had; it is not done then.
    fn run(&self, urgency: Urgency, job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let mut queue = self.lock();
        queue.jobs[urgency as usize].push_back(Box::new(job));
        let all_long = urgency != Urgency::Short && queue.long >= MOST_LONG;
        if queue.working >= MOST || all_long {
            return Ok(());
        }
        let workers = self.clone();
        match essential_thread("move", move || workers.work()) {
            Ok(()) => queue.working += 1,
            // Those who work do it.
            Err(_) if queue.working > 0 => {}
            Err(error) => {
                queue.jobs[urgency as usize].pop_back();
                return Err(error);
            }
        }
        Ok(())
    }

    fn work(&self) {
        let mut was_long = false;
        while let Some((job, is_long)) = self.next(was_long) {
            job();
            was_long = is_long;
        }
    }

    fn next(&self, was_long: bool) -> Option<(Job, bool)> {
        let mut queue = self.lock();
        queue.long -= usize::from(was_long);
        let next = queue.take();
        if next.is_none() {
            queue.working -= 1;
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Empties a range of memory now.
pub(super) fn empty(object: &Object, offset: u64, length: u64) -> Result<(), String> {
    // What its last page has beyond the end belongs to no segment.
    let length = length.next_multiple_of(4096);
    sparse::empty(object, offset, length).map_err(|error| {
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
        let urgency = if length <= SHORT { Urgency::Short } else { Urgency::Long };
        self.workers.run(urgency, move || {
            let (source, target) = (&*from.0, &*to.0);
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
        self.workers.run(Urgency::Later, move || {
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
        service.workers.run(Urgency::Later, move || done.send(()).unwrap()).unwrap();
        all.recv_timeout(Duration::from_secs(60)).expect("all are moved");
    }

    #[test]
    fn all_is_done_and_each_once() {
        let workers = Workers::default();
        let (done, all) = mpsc::channel();
        for number in 0..1000 {
            let done = done.clone();
            let urgency = [Urgency::Short, Urgency::Long, Urgency::Later][number as usize % 3];
            workers.run(urgency, move || done.send(number).unwrap()).unwrap();
        }
        drop(done);
        let mut numbers: Vec<u32> = all.iter().collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000));
    }

    #[test]
    fn what_takes_a_moment_waits_for_nothing_that_takes_long() {
        let workers = Workers::default();
        let (go_on, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for urgency in [Urgency::Long, Urgency::Later].repeat(MOST) {
            let wait = wait.clone();
            let long = move || assert!(wait.lock().unwrap().recv().is_err(), "nobody sends");
            workers.run(urgency, long).unwrap();
        }
        let (done, ended) = mpsc::channel();
        for _ in 0..3 {
            let done = done.clone();
            workers.run(Urgency::Short, move || done.send(()).unwrap()).unwrap();
        }
        for _ in 0..3 {
            ended.recv_timeout(Duration::from_secs(60)).expect("there is a thread for it");
        }
        drop(go_on);
        workers.run(Urgency::Later, move || done.send(()).unwrap()).unwrap();
        ended.recv_timeout(Duration::from_secs(60)).expect("the others go on");
    }
}
