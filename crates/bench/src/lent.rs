//! Our side: a lender in a process of its own, and a client that uses the drive.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rackbus_devices::nvme::{BackingConfig, Nvme, NvmeConfig};
use rackbus_driver::{
    Drive, DriveBuffer, DriveError, DriveOptions, DriveQueue, DrivenFunction, InThreadFunction,
};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{ClientError, serve_function};
use rackbus_spec::nvme::IoOpcode;

use crate::BenchError;
use crate::machine::{CLIENT_CPU, RestartCommand, SERVER_CPU, pin};
use crate::nvme::ClientLoad;
use crate::raw::STORE;

/// Commands in flight that the drive is opened for.
const DEPTH: u16 = 64;
/// How long a drive may take to be free again.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a drive of the size of the raw bound's store looks like.
pub fn config(backing: BackingConfig) -> NvmeConfig {
    NvmeConfig { backing, block_size: 4096, ..NvmeConfig::memory(STORE as u64, "BENCH") }
}

/// The lender's process: serves a drive at `socket` until its standard input ends.
///
/// # Errors
/// When the drive or the socket cannot be made.
pub fn lend(backing: BackingConfig, socket: &Path) -> Result<(), BenchError> {
    let options = EngineOptions { cpu: Some(SERVER_CPU), ..EngineOptions::default() };
    let nvme = Box::new(Nvme::new(&config(backing))?);
    let _served = serve_function(nvme, socket, options).map_err(BenchError::io("serving"))?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new()).map_err(BenchError::io("waiting"))?;
    Ok(())
}

/// A lender's process, ended when dropped.
#[derive(Debug)]
pub struct LenderProcess {
    process: Child,
    socket: PathBuf,
}

impl LenderProcess {
    /// Starts one with the drive `name`, with its socket in `dir`.
    ///
    /// # Errors
    /// When the process does not come up.
    pub fn start(
        again: &RestartCommand,
        backing: &BackingConfig,
        dir: &Path,
        name: &str,
    ) -> Result<LenderProcess, BenchError> {
        let socket = dir.join(format!("{name}.sock"));
        let mut command = again.command("lender")?;
        command.arg("--socket").arg(&socket);
        match backing {
            BackingConfig::Memory => command.args(["--backing", "memory"]),
            BackingConfig::Null => command.args(["--backing", "null"]),
            BackingConfig::File(path) => command.arg("--file").arg(path),
            BackingConfig::Part(_) => {
                return Err(BenchError::Peer("whole drives are measured, not parts".to_owned()));
            }
        };
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(BenchError::io("starting a lender"))?;
        let mut line = String::new();
        if let Some(out) = process.stdout.take() {
            BufReader::new(out).read_line(&mut line).map_err(BenchError::io("the lender"))?;
        }
        if line.trim() != "ready" {
            return Err(BenchError::Peer("the lender did not come up".to_owned()));
        }
        Ok(LenderProcess { process, socket })
    }

    /// Process id of the lending process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Opens the lent drive with a driver of this process, as its borrower does.
    ///
    /// # Errors
    /// When it cannot be opened within a few seconds.
    pub fn borrow_drive(&self, data: usize) -> Result<Drive, BenchError> {
        open(&self.socket, data)
    }
}

/// Opens the drive at `socket`, which may still be released by the borrower before.
///
/// # Errors
/// When it cannot be opened within a few seconds.
pub fn open(socket: &Path, data: usize) -> Result<Drive, BenchError> {
    let start = Instant::now();
    loop {
        match Drive::open(socket, DriveOptions { depth: DEPTH, data }) {
            Err(DriveError::Client(ClientError::Refused(_))) if start.elapsed() < PATIENCE => {
                std::thread::yield_now();
            }
            opened => return Ok(opened?),
        }
    }
}

impl Drop for LenderProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The same drive without lending: the model runs in the client's own thread.
///
/// # Errors
/// When the drive cannot be made.
pub fn local_drive(backing: BackingConfig, data: usize) -> Result<Drive, BenchError> {
    let nvme = Nvme::new(&config(backing))?;
    let device = Box::new(InThreadFunction::new(Box::new(nvme)));
    Ok(Drive::with_device(device, DriveOptions { depth: DEPTH, data })?)
}

/// Runs `load` on `drive` for about `time`; returns operations per second.
///
/// # Errors
/// When the drive fails.
pub fn run(drive: &mut Drive, load: &ClientLoad, time: Duration) -> Result<f64, BenchError> {
    pin(CLIENT_CPU);
    run_anywhere(drive, load, time)
}

/// As [`run`], on whatever processor the system chooses.
///
/// # Errors
/// When the drive fails.
pub fn run_anywhere(
    drive: &mut Drive,
    load: &ClientLoad,
    time: Duration,
) -> Result<f64, BenchError> {
    let block = u64::from(drive.info().block_size);
    let size = drive.info().blocks * block;
    let mut buffers = Vec::new();
    for slot in 0..usize::from(load.depth) {
        let buffer = drive.buffer(slot * load.bytes, load.bytes);
        buffers.push(buffer.ok_or(DriveError::Request("the drive was opened with less data"))?);
    }
    let (queue, device, _) = drive.parts();
    let mut client = Client {
        queue,
        device,
        buffers,
        by_id: vec![0; usize::from(DEPTH)],
        opcode: if load.write { IoOpcode::Write } else { IoOpcode::Read },
        blocks: (load.bytes as u64 / block) as u32,
    };
    let mut next = load.offsets(size);
    client.run(|| next() / block, load, time)
}

struct Client<'a> {
    queue: &'a mut DriveQueue,
    device: &'a mut dyn DrivenFunction,
    buffers: Vec<DriveBuffer>,
    /// Which buffer a command uses, by its identifier.
    by_id: Vec<usize>,
    opcode: IoOpcode,
    blocks: u32,
}

impl Client<'_> {
    fn send(&mut self, lba: u64, buffer: usize) -> Result<(), BenchError> {
        let id = self.queue.submit(self.opcode, lba, self.blocks, self.buffers[buffer], false)?;
        self.by_id[usize::from(id)] = buffer;
        Ok(())
    }

    /// Waits for a completion, and takes all there are then; adds the buffers that are free now.
    fn take(&mut self, free: &mut Vec<usize>) -> Result<(), BenchError> {
        let mut next = self.queue.wait(self.device)?;
        while let Some(completed) = next {
            if !completed.status.is_success() {
                let (command, status) = ("transfer", completed.status);
                return Err(DriveError::Command { command, status }.into());
            }
            free.push(self.by_id[usize::from(completed.id)]);
            next = self.queue.poll(self.device)?;
        }
        Ok(())
    }

    fn run(
        &mut self,
        mut next_lba: impl FnMut() -> u64,
        load: &ClientLoad,
        time: Duration,
    ) -> Result<f64, BenchError> {
        let mut free: Vec<usize> = (0..usize::from(load.depth)).collect();
        let (mut done, mut counted) = (0u64, None);
        let mut start = Instant::now();
        let mut looks = 0u32;
        loop {
            while let Some(buffer) = free.pop() {
                self.send(next_lba(), buffer)?;
            }
            self.queue.ring(self.device)?;
            self.take(&mut free)?;
            done += free.len() as u64;
            looks = looks.wrapping_add(1);
            if !looks.is_multiple_of(256) && load.bytes <= 65536 {
                continue;
            }
            let elapsed = start.elapsed();
            match counted {
                None if elapsed >= time / 10 => {
                    (counted, start) = (Some(done), Instant::now());
                }
                Some(from) if elapsed >= time => {
                    let rate = (done - from) as f64 / elapsed.as_secs_f64();
                    self.drain(load.depth as usize - free.len())?;
                    return Ok(rate);
                }
                _ => {}
            }
        }
    }

    /// Waits for the last `in_flight` commands.
    fn drain(&mut self, mut in_flight: usize) -> Result<(), BenchError> {
        let mut free = Vec::new();
        while in_flight > free.len() {
            self.take(&mut free)?;
        }
        in_flight -= free.len();
        debug_assert_eq!(in_flight, 0);
        Ok(())
    }
}
