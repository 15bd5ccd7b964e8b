//! What the library is to the process that it is in: each test runs itself again, as a process of its own.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rackbus_attach::Session;
use rackbus_memory::AdaptiveSpin;
use rackbus_memory::packets::{MAX_PACKET, PacketListener};
use sisci::constants::errors::{SCI_ERR_NO_LINK_ACCESS, SCI_ERR_OK};
use sisci::library::{SCIInitialize, SCIOpen};
use sisci::local::SCICreateSegment;
use support::Rack;

/// Says that this is the process that a test has run.
const ROLE: &str = "RACKBUS_TEST_ROLE";

/// Whether this is the test's other process.
fn is_other() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// Runs a test of this file once more, with another run directory.
fn again(test: &str, run_dir: &Path, errors: Stdio) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // What is captured goes nowhere that could be full.
    command.args(["--exact", test, "--nocapture"]).stdout(Stdio::null()).stderr(errors);
    command.env(ROLE, "1").env("RACKBUS_RUN_DIR", run_dir).env("RACKBUS_HOST", "alpha");
    command.status().unwrap()
}

fn initialize() -> u32 {
    let mut error = SCI_ERR_OK;
    // SAFETY: `error` can be written to.
    unsafe { SCIInitialize(0, &raw mut error) };
    error
}

#[test]
fn a_full_standard_error_output_is_no_end_of_the_program() {
    if is_other() {
        std::process::exit(i32::from(initialize() != SCI_ERR_NO_LINK_ACCESS));
    }
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let test = "a_full_standard_error_output_is_no_end_of_the_program";
    let status = again(test, Path::new("/nonexistent"), full.into());
    assert!(status.success(), "{status}");
}

/// Waits for the end of a child of this process, which is to come in time.
fn ends(child: libc::pid_t) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        let mut status = 0;
        // SAFETY: the child is this process', and `status` can be written to.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: the child was not waited for, so the number is still its.
    unsafe { libc::kill(child, libc::SIGKILL) };
    false
}

/// A process forks while another of its threads waits for a node that does not answer; whether the child ends.
fn forks_while_a_node_is_waited_for() -> bool {
    let socket =
        Path::new(&std::env::var_os("RACKBUS_RUN_DIR").unwrap()).join("alpha/segments.sock");
    let listener = PacketListener::bind(&socket).unwrap();
    let opening = std::thread::spawn(initialize);
    let node = listener.accept().unwrap();
    let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
    // It has said hello, and waits for the answer.
    node.receive(&mut buffer, &mut spin, None).unwrap();
    // SAFETY: the child calls nothing but the library's own handler of forks, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child without what the parent would do at its end.
        unsafe { libc::_exit(0) };
    }
    let ended = ends(child);
    drop(node);
    ended && opening.join().unwrap() == SCI_ERR_NO_LINK_ACCESS
}

#[test]
fn a_fork_ends_while_a_node_does_not_answer() {
    if is_other() {
        std::process::exit(i32::from(!forks_while_a_node_is_waited_for()));
    }
    let run_dir = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
    std::fs::create_dir(run_dir.path().join("alpha")).unwrap();
    let test = "a_fork_ends_while_a_node_does_not_answer";
    let status = again(test, run_dir.path(), Stdio::inherit());
    assert!(status.success(), "{status}");
}

/// Processes that are killed when the test ends, however it does.
struct Killed(Vec<libc::pid_t>);

impl Drop for Killed {
    fn drop(&mut self) {
        for process in &self.0 {
            // SAFETY: nobody has waited for it, or it was this process' own: at worst there is none of that number.
            unsafe { libc::kill(*process, libc::SIGKILL) };
        }
    }
}

/// A process makes a segment and forks. It says so with the number of its child, and both stay until they are killed.
fn forks_with_a_segment() -> ! {
    assert_eq!(initialize(), SCI_ERR_OK);
    let (mut error, mut sd, mut segment) = (SCI_ERR_OK, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: what is pointed to can be written to, and there is no callback.
    unsafe {
        SCIOpen(&raw mut sd, 0, &raw mut error);
        let none = std::ptr::null_mut();
        SCICreateSegment(sd, &raw mut segment, 7, 4096, None, none, 0, &raw mut error);
    }
    assert_eq!(error, SCI_ERR_OK);
    // SAFETY: the child calls nothing but the library's own handler of forks, and waits.
    let child = unsafe { libc::fork() };
    if child != 0 {
        println!("child {child}");
    }
    loop {
        std::thread::park();
    }
}

#[test]
fn what_a_killed_process_had_ends_although_a_fork_of_it_lives() {
    if is_other() {
        forks_with_a_segment();
    }
    let rack = Rack::start();
    let place = rack.location("alpha");
    let test = "what_a_killed_process_had_ends_although_a_fork_of_it_lives";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).stdout(Stdio::piped());
    command.env(ROLE, "1").env("RACKBUS_RUN_DIR", &place.run_dir).env("RACKBUS_HOST", &place.host);
    let mut process = command.spawn().unwrap();
    let mut says = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut killed = Killed(vec![process.id().cast_signed()]);
    let child = says.find_map(|line| line.split_once("child ")?.1.parse::<i32>().ok()).unwrap();
    killed.0.push(child);
    let session = Session::open(&place).unwrap();
    let has = || session.segments().unwrap().iter().any(|it| it.id == 7);
    assert!(has(), "it has a segment");
    killed.0.remove(0);
    process.kill().unwrap();
    process.wait().unwrap();
    let begun = Instant::now();
    while has() {
        let late = begun.elapsed() > Duration::from_secs(30);
        assert!(!late, "the segment is there as long as the fork");
        std::thread::sleep(Duration::from_millis(5));
    }
}
