//! A tenant that is killed in the middle of operations: its function is free again, and another tenant does not notice.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{LocalFunction, serve_function};
use rackbus_qos::TenantId;
use rackbus_spec::accel::Operation;

/// Where the tenant that is to be killed finds its function.
const SOCKET: &str = "RACKBUS_TEST_KILLED_TENANT";
const LIMIT: Duration = Duration::from_secs(60);
const DEFLATE: [(Operation, u16); 1] = [(Operation::Deflate, 0)];
const DEPTH: u16 = 32;

/// What is not short, and does not compress: tens of milliseconds of engine time.
fn noise() -> Vec<u8> {
    let mut state = 1u64;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    });
    noise.take(900_000).collect()
}

fn open(socket: &Path) -> Accel {
    let options = AccelOptions { depth: DEPTH, ..AccelOptions::default() };
    Accel::open(socket, LIMIT, options).unwrap()
}

/// The tenant: a process of its own that keeps operations under way, and says so. Nothing to do in a usual run.
#[test]
fn tenant_that_is_killed() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut accel = open(Path::new(&socket));
    let noise = noise();
    accel.data(0, noise.len()).unwrap().copy_from(&noise);
    let work = MessageWork { stages: &DEFLATE, ..MessageWork::default() };
    let descriptor = accel.describe(&work, (0, noise.len()), (1 << 20, 1 << 20)).unwrap();
    let mut said = false;
    loop {
        while accel.under_way(0) < DEPTH.into() {
            accel.push(0, &descriptor).unwrap();
        }
        accel.ring(0).unwrap();
        accel.wait(0).unwrap();
        if !std::mem::replace(&mut said, true) {
            println!("under way");
            std::io::stdout().flush().unwrap();
        }
    }
}

fn serve(pool: &std::sync::Arc<EnginePool>, tenant: u32, socket: &Path) -> LocalFunction {
    let model = Accelerator::new(pool, TenantId(tenant), None, 1).unwrap();
    serve_function(Box::new(model), socket, EngineOptions::default()).unwrap()
}

#[test]
fn a_tenant_that_is_killed_in_the_middle_of_operations_is_gone_and_others_do_not_notice() {
    let folder = tempfile::tempdir().unwrap();
    let sockets = [1, 2].map(|tenant| folder.path().join(format!("accel{tenant}.sock")));
    let pool = EnginePool::new(PoolOptions::default());
    let _served = [1, 2].map(|tenant| serve(&pool, tenant, &sockets[tenant as usize - 1]));
    let noise = noise();
    let mut other = open(&sockets[1]);
    let work = MessageWork { stages: &DEFLATE, ..MessageWork::default() };
    for _ in 0..3 {
        let mut killed = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tenant_that_is_killed", "--nocapture", "--test-threads=1"])
            .env(SOCKET, &sockets[0])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(killed.stdout.take().unwrap()).lines();
        let mut said = said.map_while(Result::ok);
        assert!(said.any(|line| line.contains("under way")), "the tenant does not begin");
        let begun = Instant::now();
        while pool.waiting() == 0 {
            assert!(begun.elapsed() < LIMIT, "nothing of the one that is killed is under way");
            std::thread::yield_now();
        }
        // Of the other one, something is under way when the first is killed, too.
        other.data(0, noise.len()).unwrap().copy_from(&noise);
        let descriptor = other.describe(&work, (0, noise.len()), (1 << 20, 1 << 20)).unwrap();
        other.push(0, &descriptor).unwrap();
        other.ring(0).unwrap();
        killed.kill().unwrap();
        killed.wait().unwrap();
        let completion = other.wait(0).unwrap();
        assert_eq!(completion.status, 0);
        let mut result = vec![0; completion.output as usize];
        other.data(1 << 20, result.len()).unwrap().copy_to(&mut result);
        let inflate = [(Operation::Inflate, 0)];
        let back = MessageWork { stages: &inflate, ..MessageWork::default() };
        assert!(
            other.run(&back, &result, 1 << 20).unwrap() == noise,
            "it ended otherwise than alone"
        );
        // Nothing of the killed one waits for engines, and its function is there for the next one.
        let begun = Instant::now();
        while pool.waiting() > 0 {
            assert!(begun.elapsed() < LIMIT, "{} operations wait for nobody", pool.waiting());
            std::thread::yield_now();
        }
        let copy = [(Operation::Copy, 0)];
        let work = MessageWork { stages: &copy, ..MessageWork::default() };
        assert_eq!(open(&sockets[0]).run(&work, b"again", 5).unwrap(), b"again");
    }
    assert_eq!(pool.failed(), 0);
}
