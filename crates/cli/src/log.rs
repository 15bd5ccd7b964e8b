//! What nodes and control plane log: as much as `RACKBUS_LOG` asks for, but of each cause only so
//! many lines in a while, and never more than two files of a bounded size.
//!
//! A cause is a place in the source. What it says beyond its share is counted, and the count is
//! logged: whoever makes a process repeat itself (a guest, a peer) can neither fill a disk with that
//! nor hide other lines. `debug` and `trace`, which somebody asked for, are not counted.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Lines that a cause may write within [`WHILE`].
const SHARE: u64 = 20;
/// How long a share is for.
const WHILE: Duration = Duration::from_secs(10);
/// A log that has grown to this many bytes becomes the one before, and a new one is begun.
const LARGEST: u64 = 4 << 20;

/// Lines left out since the process began.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// How many lines were left out since the process began.
pub fn lines_left_out() -> u64 {
    LEFT_OUT.load(Ordering::Relaxed)
}

/// Begins to log on stderr. Where that is a file, it is the one at `path`, which is exchanged when it has grown. Other
/// processes may log there too.
pub fn start(path: Option<&Path>) {
    let wanted = EnvFilter::try_from_env("RACKBUS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let limits = Limits::default();
    let log = Log::new(path, LARGEST);
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(log.clone())
        .with_filter(limits.clone());
    tracing_subscriber::registry().with(wanted).with(lines).init();
    let count = move || {
        loop {
            std::thread::sleep(WHILE);
            for line in limits.lock().left_out(Instant::now()) {
                let _ = log.clone().write_all(line.as_bytes());
            }
        }
    };
    // Without the thread the counts are told when their causes come again.
    if let Err(error) = std::thread::Builder::new().name("log counts".into()).spawn(count) {
        tracing::warn!(%error, "cannot start the thread that logs how much was left out");
    }
}

/// Has stderr, and with it a panic's last words, go to the new file.
fn exchange_stderr(file: &File) {
    if let Err(error) = rustix::stdio::dup2_stderr(file) {
        // The old one goes on; there is nowhere else to say so.
        let _ = writeln!(std::io::stderr(), "the log cannot be exchanged: {error}");
    }
}

/// How much each cause has said.
#[derive(Debug, Clone, Default)]
struct Limits(Arc<Mutex<Causes>>);

impl Limits {
    fn lock(&self) -> MutexGuard<'_, Causes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Subscriber> Filter<S> for Limits {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return true;
        }
        let place = || {
            let file = metadata.file().unwrap_or(metadata.target());
            format!("{} {file}:{}", metadata.level(), metadata.line().unwrap_or(0))
        };
        let admitted = self.lock().admit(metadata.callsite(), Instant::now(), place);
        LEFT_OUT.fetch_add(u64::from(!admitted), Ordering::Relaxed);
        admitted
    }
}

#[derive(Debug, Default)]
struct Causes(HashMap<Identifier, Cause>);

#[derive(Debug)]
struct Cause {
    place: String,
    /// Since when its share is counted.
    since: Instant,
    said: u64,
    left_out: u64,
    /// Since the process began.
    left_out_ever: u64,
}

impl Causes {
    /// Whether a cause may say something now.
    fn admit(&mut self, cause: Identifier, now: Instant, place: impl FnOnce() -> String) -> bool {
        let cause = self.0.entry(cause).or_insert_with(|| Cause {
            place: place(),
            since: now,
            said: 0,
            left_out: 0,
            left_out_ever: 0,
        });
        if now.saturating_duration_since(cause.since) >= WHILE {
            (cause.since, cause.said) = (now, 0);
        }
        cause.said += 1;
        if cause.said <= SHARE {
            return true;
        }
        cause.left_out += 1;
        cause.left_out_ever += 1;
        false
    }

    /// A line for each cause of which something was left out since this was asked last.
    fn left_out(&mut self, now: Instant) -> Vec<String> {
        let causes = self.0.values_mut().filter(|cause| cause.left_out > 0);
        let tell = |cause: &mut Cause| {
            let (count, ever) = (std::mem::take(&mut cause.left_out), cause.left_out_ever);
            let ago = now.saturating_duration_since(cause.since).as_secs();
            format!("left out: {count} lines as of {ago} s ago, {ever} ever: {}\n", cause.place)
        };
        causes.map(tell).collect()
    }
}

/// Where lines go: stderr, which is a file of bounded size where there is a path.
#[derive(Debug, Clone)]
struct Log(Arc<Mutex<Target>>);

#[derive(Debug)]
struct Target {
    path: Option<PathBuf>,
    largest: u64,
}

impl Log {
    fn new(path: Option<&Path>, largest: u64) -> Log {
        let path = path.filter(|_| stderr_file().is_some()).map(Path::to_owned);
        Log(Arc::new(Mutex::new(Target { path, largest })))
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        // One line after the other, so that the file is exchanged once.
        let target = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        target.make_room();
        std::io::stderr().write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Target {
    /// Exchanges the file when it has grown, and follows where another process has exchanged it: a process that serves a
    /// guest and the one that stands by write to the same.
    fn make_room(&self) {
        let Some(path) = &self.path else { return };
        if let Some(length) = own_length(path)
            && (length < self.largest || !self.rename(path))
        {
            return;
        }
        match File::options().create(true).append(true).open(path) {
            // Ends this process' lock on the old file.
            Ok(file) => exchange_stderr(&file),
            // The old one goes on.
            Err(_) => drop(rustix::fs::fcntl_lock(std::io::stderr(), FlockOperation::Unlock)),
        }
    }

    /// Makes the file the one before; false where it cannot be renamed, or another process is just doing so, and it is written
    /// on. The file is locked for this process then, for another one that finds it full at the same moment must not do
    /// that to the new file.
    fn rename(&self, path: &Path) -> bool {
        let lock = |operation| rustix::fs::fcntl_lock(std::io::stderr(), operation);
        if lock(FlockOperation::NonBlockingLockExclusive).is_err() {
            return false;
        }
        let mut before = path.as_os_str().to_owned();
        before.push(".1");
        let done = own_length(path).is_none() || std::fs::rename(path, before).is_ok();
        if !done {
            let _ = lock(FlockOperation::Unlock);
        }
        done
    }
}

/// Bytes of the file at `path` where it is the one that stderr is.
fn own_length(path: &Path) -> Option<u64> {
    let there = path.metadata().ok()?;
    (stderr_file() == Some((there.dev(), there.ino()))).then_some(there.len())
}

/// The device and number of the file that stderr is; nothing where it is a terminal or a pipe.
fn stderr_file() -> Option<(u64, u64)> {
    let own = rustix::fs::fstat(std::io::stderr()).ok()?;
    let is_file = rustix::fs::FileType::from_raw_mode(own.st_mode).is_file();
    is_file.then_some((own.st_dev, own.st_ino))
}

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;

    use super::*;

    /// Two places in the source.
    fn causes() -> [Identifier; 2] {
        use tracing::Callsite;
        use tracing::metadata::Kind;
        let one = tracing::callsite!(name: "one", kind: Kind::EVENT, fields: message);
        let other = tracing::callsite!(name: "other", kind: Kind::EVENT, fields: message);
        [one, other].map(|callsite| callsite.metadata().callsite())
    }

    #[test]
    fn a_cause_says_its_share_and_the_rest_is_counted() {
        let (mut limits, [one, other]) = (Causes::default(), causes());
        let begun = Instant::now();
        let said = |at: Duration, cause: &Identifier, limits: &mut Causes| {
            limits.admit(cause.clone(), begun + at, || "WARN here:1".to_owned())
        };
        let heard = (0..120_000).filter(|_| said(Duration::ZERO, &one, &mut limits)).count();
        assert_eq!(heard as u64, SHARE);
        assert!(said(Duration::ZERO, &other, &mut limits), "one cause silences another");
        let told = limits.left_out(begun);
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("119980 lines") && told[0].contains("WARN here:1"), "{told:?}");
        assert!(limits.left_out(begun).is_empty(), "told twice");
        assert!(said(WHILE, &one, &mut limits), "silent for ever");
        for _ in 0..SHARE {
            said(WHILE, &one, &mut limits);
        }
        assert!(limits.left_out(begun + WHILE)[0].contains("1 lines as of 0 s ago, 119981 ever"));
    }

    const LOG: &str = "RACKBUS_TEST_LOG";
    const LARGEST: u64 = 1000;

    /// The log that a test is to write what it reads into, where it was started by [`writer`].
    fn log_to_write() -> Option<(PathBuf, Log)> {
        let path = PathBuf::from(std::env::var_os(LOG)?);
        let log = Log::new(Some(&path), LARGEST);
        Some((path, log))
    }

    /// The test of that name as a process whose stderr is the log, as a node's or a helper's is.
    fn writer(name: &str, log: &Path) -> std::process::Child {
        let file = File::options().create(true).append(true).open(log).unwrap();
        let mut process = std::process::Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "--nocapture", name]).env(LOG, log);
        let (stdin, stdout) = (std::process::Stdio::piped(), std::process::Stdio::piped());
        process.stdin(stdin).stdout(stdout).stderr(file).spawn().unwrap()
    }

    #[test]
    fn of_two_processes_that_find_a_log_full_at_once_one_exchanges_it() {
        const LINES: u64 = 30_000;
        let line = format!("{}\n", "x".repeat(99));
        if let Some((path, mut log)) = log_to_write() {
            let before = path.with_extension("log.1");
            for nth in 0..LINES {
                log.write_all(line.as_bytes()).unwrap();
                let length = before.metadata().map(|it| it.len());
                assert!(length.is_ok_and(|it| it >= LARGEST) || nth < 10, "lost after {nth} lines");
            }
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.log");
        let name = "log::tests::of_two_processes_that_find_a_log_full_at_once_one_exchanges_it";
        let writers = [(); 2].map(|()| writer(name, &path));
        for writer in writers {
            let said = writer.wait_with_output().unwrap();
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stdout));
        }
    }

    #[test]
    fn a_log_that_has_grown_becomes_the_one_before_for_all_who_write_to_it() {
        if let Some((_, mut log)) = log_to_write() {
            for line in std::io::stdin().lines() {
                log.write_all(format!("{}\n", line.unwrap()).as_bytes()).unwrap();
                println!("\nwritten");
            }
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.log");
        let name =
            "log::tests::a_log_that_has_grown_becomes_the_one_before_for_all_who_write_to_it";
        let mut writers = [(); 2].map(|()| writer(name, &path));
        let mut answers =
            [0, 1].map(|at| std::io::BufReader::new(writers[at].stdout.take().unwrap()).lines());
        for nth in 0..100 {
            let writer = nth % 2;
            let line = format!("{nth:03} {}\n", "x".repeat(60));
            writers[writer].stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
            answers[writer].find(|it| it.as_ref().unwrap() == "written").unwrap().unwrap();
        }
        for mut writer in writers {
            drop(writer.stdin.take());
            assert!(writer.wait().unwrap().success());
        }
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        let (before, now) = (read(&folder.path().join("node.log.1")), read(&path));
        for text in [&before, &now] {
            assert!(text.len() as u64 <= LARGEST + 65, "{} bytes", text.len());
        }
        // The last lines of both, none of them lost.
        let lines: Vec<&str> = before.lines().chain(now.lines()).map(|line| &line[..3]).collect();
        let all: Vec<String> = (100 - lines.len()..100).map(|nth| format!("{nth:03}")).collect();
        assert_eq!(lines, all);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
