//! The limit of strict isolation: what a file's data reaches at best that is copied twice, with nothing else done.
//!
//! The lender copies between the file's pages in the page cache and memory that both sides have, the borrower between that
//! and its user's memory; neither may have what the other one reads. So both copies are made here without a drive: by
//! a thread each, which pass parts to each other through a ring, on two processors, and by one thread, for which the data is
//! in its processor's own cache when it copies it for the second time. Both are put beside the one copy of a drive
//! whose front is at the lender.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Bench, Settings, make_image, read_into_cache};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU, pin};
use crate::raw::STORE;

/// Bytes of a part, as those of a command.
const PART: usize = 128 << 10;
/// Parts of the ring, as many as commands are under way.
const PARTS: usize = 8;

/// A part of memory; whoever works on it has it locked, which nobody else ever waits for.
type Part = Mutex<Vec<u8>>;

/// The memory that both copies use.
struct Copies {
    image: File,
    ring: Vec<Part>,
    user: Vec<Part>,
    write: bool,
}

fn parts() -> Vec<Part> {
    (0..PARTS).map(|_| Mutex::new(vec![1; PART])).collect()
}

impl Copies {
    /// Copies part `number` between the file and one of `memory`.
    fn file(&self, number: usize, memory: &[Part]) -> std::io::Result<()> {
        let offset = (number % (STORE / PART) * PART) as u64;
        let mut part = memory[number % PARTS].lock().unwrap_or_else(PoisonError::into_inner);
        match self.write {
            true => self.image.write_all_at(&part, offset),
            false => self.image.read_exact_at(&mut part, offset),
        }
    }

    /// Copies part `number` between the ring and the user's memory.
    fn memory(&self, number: usize) {
        let mut ring = self.ring[number % PARTS].lock().unwrap_or_else(PoisonError::into_inner);
        let mut user = self.user[number % PARTS].lock().unwrap_or_else(PoisonError::into_inner);
        match self.write {
            true => ring.copy_from_slice(&user),
            false => user.copy_from_slice(&ring),
        }
    }

    /// Gigabytes a second of `copy`, of one part after the other.
    fn alone(
        &self,
        time: Duration,
        copy: impl Fn(usize) -> std::io::Result<()>,
    ) -> Result<f64, BenchError> {
        pin(SERVER_CPU);
        let (begun, mut number) = (Instant::now(), 0);
        while begun.elapsed() < time {
            copy(number).map_err(BenchError::io("copying between a file and memory"))?;
            number += 1;
        }
        Ok((number * PART) as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }

    /// One copy, as a drive makes it whose front is at the lender.
    fn once(&self, time: Duration) -> Result<f64, BenchError> {
        self.alone(time, |number| self.file(number, &self.user))
    }

    /// Both copies by one thread.
    fn by_one(&self, time: Duration) -> Result<f64, BenchError> {
        self.alone(time, |number| {
            if self.write {
                self.memory(number);
            }
            self.file(number, &self.ring)?;
            if !self.write {
                self.memory(number);
            }
            Ok(())
        })
    }

    /// Each copy by a thread of its own.
    fn by_two(&self, time: Duration) -> Result<f64, BenchError> {
        // How many parts were copied between the file and the ring, and between that and the user's memory.
        let (by_file, by_memory) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let stop = AtomicBool::new(false);
        // Who copies first is a ring's length ahead of the other one at most.
        let may = |own: usize, other: &AtomicUsize, first: bool| {
            let other = other.load(Ordering::Acquire);
            if first { own < other + PARTS } else { own < other }
        };
        std::thread::scope(|scope| {
            let file = scope.spawn(|| {
                pin(SERVER_CPU);
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    if !may(number, &by_memory, !self.write) {
                        std::hint::spin_loop();
                        continue;
                    }
                    self.file(number, &self.ring)?;
                    number += 1;
                    by_file.store(number, Ordering::Release);
                }
                Ok(())
            });
            pin(CLIENT_CPU);
            let (begun, mut number) = (Instant::now(), 0);
            while begun.elapsed() < time && !file.is_finished() {
                if !may(number, &by_file, self.write) {
                    std::hint::spin_loop();
                    continue;
                }
                self.memory(number);
                number += 1;
                by_memory.store(number, Ordering::Release);
            }
            let rate = (number * PART) as f64 / begun.elapsed().as_secs_f64() / 1e9;
            stop.store(true, Ordering::Relaxed);
            let ended = file.join().map_err(|_| BenchError::Peer("a copy panicked".to_owned()))?;
            ended.map_err(BenchError::io("copying between a file and memory"))?;
            Ok(rate)
        })
    }
}

impl Bench<'_> {
    /// Two copies against one.
    pub(super) fn copies(&mut self) -> Result<(), BenchError> {
        let cases = [
            ("bare copies: 128k read, two threads", false, true),
            ("bare copies: 128k read, one thread", false, false),
            ("bare copies: 128k write, two threads", true, true),
            ("bare copies: 128k write, one thread", true, false),
        ];
        if !cases.iter().any(|(case, ..)| self.wanted(case)) {
            return Ok(());
        }
        let Settings { dir, time, .. } = self.settings.clone();
        let path = dir.join("image-copies");
        make_image(&path)?;
        read_into_cache(&path)?;
        for (case, write, two) in cases {
            let image = File::options().read(true).write(true).open(&path);
            let image = image.map_err(BenchError::io("opening the image"))?;
            let copies = Copies { image, ring: parts(), user: parts(), write };
            self.pairs(
                case,
                "one copy",
                "GB/s",
                || if two { copies.by_two(time) } else { copies.by_one(time) },
                || copies.once(time),
                |twice, once| twice / once,
            )?;
        }
        Ok(())
    }
}
