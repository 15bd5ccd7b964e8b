//! Processes that write to frozen memory in ways that a signal handler alone cannot help with, and
//! such that have handlers of their own: each in a process of its own, this test program again.
#![cfg(not(loom))]

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rackbus_memory::{Access, Region, SharedMemory};

const LONG: Duration = Duration::from_secs(20);

fn region(length: u64) -> Region {
    let file = SharedMemory::reserve("frozen", length).unwrap();
    Region::map(file.as_fd(), 0, length, Access::READ | Access::WRITE).unwrap()
}

/// From now on the kernel protects nothing: there is no descriptor left to ask it with.
fn without_kernel() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let first = region(4096);
    setrlimit(Resource::Nofile, none).unwrap();
    first.freeze(0, 4096).unwrap();
    first.unfreeze().unwrap();
}

/// Whether the kernel protects, as far as a process can tell: it has to be new enough, and made so.
fn kernel_protects() -> bool {
    // SAFETY: the flag says that only what the process does itself is of interest.
    unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::from_bits_retain(1)) }.is_ok()
        && {
            let release = rustix::system::uname().release().to_string_lossy().into_owned();
            let mut numbers = release.split(|c: char| !c.is_ascii_digit());
            let mut number = || numbers.next()?.parse::<u32>().ok();
            (number(), number()) >= (Some(6), Some(4))
        }
}

/// A thread writes to frozen memory as `write` does; it has to wait until it is unfrozen.
fn waits(region: &Region, write: impl FnOnce(&Region) + Send) {
    region.freeze(0, region.len() as u64).unwrap();
    let (begins, begun) = mpsc::channel();
    let (done, written) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            begins.send(()).unwrap();
            write(region);
            done.send(()).unwrap();
        });
        begun.recv().unwrap();
        // Long enough for who does not wait, or dies.
        assert!(written.recv_timeout(Duration::from_millis(30)).is_err(), "it did not wait");
        assert_eq!(region.whole().read_obj::<u64>(0), Some(0));
        region.unfreeze().unwrap();
        written.recv_timeout(LONG).expect("it waits for ever");
    });
    assert_eq!(region.whole().read_obj::<u64>(0), Some(7));
}

fn store(region: &Region) {
    region.whole().write_obj(0, &7_u64).unwrap();
}

fn store_blocked(region: &Region) {
    // SAFETY: plain calls about this thread's own mask.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        assert_eq!(
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()),
            0
        );
    }
    store(region);
}

static OWN: AtomicU32 = AtomicU32::new(0);

extern "C" fn own_handler(_: libc::c_int) {
    OWN.fetch_add(1, Ordering::SeqCst);
}

fn install_own() {
    // SAFETY: the handler adds to an atomic and returns.
    unsafe { libc::signal(libc::SIGSEGV, own_handler as *const () as usize) };
}

fn raise() {
    // SAFETY: a signal to this thread.
    unsafe { libc::raise(libc::SIGSEGV) };
}

/// The children's side; nothing when no parent has started it.
#[test]
fn one_process() {
    match std::env::var("RACKBUS_TEST_FROZEN").unwrap_or_default().as_str() {
        "blocked" => waits(&region(8192), store_blocked),
        "system call" => waits(&region(8192), |region| {
            let (from, to) = rustix::pipe::pipe().unwrap();
            rustix::io::write(&to, &7_u64.to_ne_bytes()).unwrap();
            // SAFETY: the region's first bytes, which nobody else uses.
            let read = unsafe {
                use std::os::fd::AsRawFd;
                libc::read(from.as_raw_fd(), region.whole().as_ptr().cast(), 8)
            };
            assert_eq!(read, 8, "{}", std::io::Error::last_os_error());
        }),
        "own handler" => {
            without_kernel();
            install_own();
            waits_without_descriptors();
            assert_eq!(OWN.load(Ordering::SeqCst), 0);
            raise();
            assert_eq!(OWN.load(Ordering::SeqCst), 1, "the program's signal is the program's");
            waits_without_descriptors();
        }
        "fork" => {
            let region = region_for_fork();
            region.freeze(0, 8192).unwrap();
            // SAFETY: the child writes to its memory and ends.
            match unsafe { libc::fork() } {
                0 => {
                    store(region);
                    // SAFETY: ends the process, as it is.
                    unsafe { libc::_exit(0) }
                }
                child => {
                    let mut status = 0;
                    // SAFETY: the child is ours.
                    unsafe { libc::waitpid(child, &raw mut status, 0) };
                    assert_eq!(status, 0);
                }
            }
        }
        "killed" => {
            // SAFETY: as for a program that has no handler; Rust's own has one.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            let region = region(8192);
            region.freeze(0, 8192).unwrap();
            region.unfreeze().unwrap();
            raise();
            std::process::exit(3);
        }
        _ => {}
    }
}

static KEPT: std::sync::OnceLock<Region> = std::sync::OnceLock::new();

fn region_for_fork() -> &'static Region {
    let made = region(8192);
    without_kernel();
    KEPT.get_or_init(|| made)
}

/// Private pages do as well where no file can be made any more.
fn waits_without_descriptors() {
    waits(&Region::reserve(8192, Access::READ | Access::WRITE).unwrap(), store);
}

fn child(what: &str) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["one_process", "--exact", "--nocapture"])
        .env("RACKBUS_TEST_FROZEN", what)
        .spawn()
        .unwrap();
    let begun = std::time::Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begun.elapsed() > LONG {
            child.kill().unwrap();
            return child.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_thread_with_blocked_signals_waits() {
    if !kernel_protects() {
        return eprintln!("the kernel protects nothing: not tested");
    }
    assert!(child("blocked").success());
}

#[test]
fn a_system_call_waits_where_the_process_may_have_that() {
    // SAFETY: as above; without the flag it is refused to those without rights.
    let rights = unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) }.is_ok();
    if !kernel_protects() || !rights {
        return eprintln!("this process may not have it: not tested");
    }
    assert!(child("system call").success());
}

#[test]
fn a_handler_that_was_installed_later_takes_nothing_from_the_guard() {
    assert!(child("own handler").success());
}

#[test]
fn a_fork_made_while_memory_is_frozen_goes_on() {
    assert!(child("fork").success());
}

#[test]
fn a_process_that_a_signal_is_to_kill_dies_of_it() {
    assert_eq!(child("killed").signal(), Some(libc::SIGSEGV));
}
