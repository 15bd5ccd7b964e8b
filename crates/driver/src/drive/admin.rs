//! The controller is enabled and asked what it is, and its queues are made.

use std::time::Instant;

use rackbus_memory::SharedMemory;
use rackbus_memory::spin::Spinning;
use rackbus_spec::nvme::command::{CreateCqCdw11, CreateSqCdw11, QueueCdw10};
use rackbus_spec::nvme::identify::{self as id, IdentifyController, IdentifyNamespace};
use rackbus_spec::nvme::registers::{self as reg, Aqa, Cap, Cc, Csts};
use rackbus_spec::nvme::{AdminOpcode, Sqe};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    ADMIN_CQ, ADMIN_ENTRIES, ADMIN_SQ, DriveInfo, IDENTIFY, LOOK_AFTER, SHADOW_EVENTS,
    SHADOW_VALUES, SPINS, TIME_LIMIT,
};
use crate::DriveError;
use crate::device::{DmaAddresses, DrivenFunction};
use crate::queue::{CQ_FACTOR, Completed, DriveQueue, PAGE, PairLayout};

/// Waits for the next completion of `queue`.
pub(super) fn wait(
    queue: &mut DriveQueue,
    device: &mut dyn DrivenFunction,
    name: &'static str,
) -> Result<Completed, DriveError> {
    let start = Instant::now();
    let mut next_look = LOOK_AFTER;
    let mut spinning = Spinning::endless();
    loop {
        for _ in 0..SPINS {
            if let Some(completed) = queue.poll(device)? {
                if completed.status.is_success() {
                    return Ok(completed);
                }
                return Err(DriveError::Command { command: name, status: completed.status });
            }
            device.progress();
            spinning.goes_on();
        }
        let waited = start.elapsed();
        if waited > next_look {
            // A drive that was lost answers nothing, and its registers read as ones.
            next_look = waited + LOOK_AFTER;
            let csts = read4(device, reg::CSTS)?;
            if Csts::from(csts).cfs() {
                return Err(failure(csts));
            }
        }
        if waited > TIME_LIMIT {
            return Err(DriveError::TimedOut(name));
        }
    }
}

/// A register of four bytes.
pub(super) fn read4(device: &mut dyn DrivenFunction, offset: u64) -> Result<u32, DriveError> {
    let mut data = [0; 4];
    device.read(offset, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn write4(device: &mut dyn DrivenFunction, offset: u64, value: u32) -> Result<(), DriveError> {
    device.write(offset, &value.to_le_bytes())
}

/// Enables the controller (NVM Express base 1.4, section 7.6.1); returns its doorbell stride.
pub(super) fn enable(device: &mut dyn DrivenFunction, iova: u64) -> Result<u8, DriveError> {
    let mut data = [0; 8];
    device.read(reg::CAP, &mut data)?;
    if data == [0xff; 8] {
        return Err(DriveError::Absent);
    }
    let cap = Cap::from(u64::from_le_bytes(data));
    if cap.css() & 1 == 0 || cap.mpsmin() > 0 {
        return Err(DriveError::Unsupported(
            "it does not speak the NVM command set with 4 KiB pages",
        ));
    }
    write4(device, reg::CC, 0)?;
    wait_ready(device, false)?;
    let aqa = Aqa::new().with_asqs(ADMIN_ENTRIES - 1).with_acqs(ADMIN_ENTRIES * CQ_FACTOR - 1);
    write4(device, reg::AQA, aqa.into())?;
    device.write(reg::ASQ, &(iova + ADMIN_SQ as u64).to_le_bytes())?;
    device.write(reg::ACQ, &(iova + ADMIN_CQ as u64).to_le_bytes())?;
    let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
    write4(device, reg::CC, cc.into())?;
    wait_ready(device, true)?;
    Ok(cap.dstrd())
}

/// What a controller status means that says that the controller can go on no more.
fn failure(csts: u32) -> DriveError {
    if csts == u32::MAX { DriveError::Absent } else { DriveError::Failed(csts) }
}

fn wait_ready(device: &mut dyn DrivenFunction, ready: bool) -> Result<(), DriveError> {
    let start = Instant::now();
    while start.elapsed() < TIME_LIMIT {
        let csts = read4(device, reg::CSTS)?;
        if Csts::from(csts).cfs() {
            return Err(failure(csts));
        }
        if Csts::from(csts).rdy() == ready {
            return Ok(());
        }
        device.progress();
        std::thread::yield_now();
    }
    Err(DriveError::TimedOut("enable"))
}

pub(super) fn admin_queue(
    memory: &SharedMemory,
    addresses: &DmaAddresses,
    dstrd: u8,
) -> DriveQueue {
    let place = PairLayout {
        id: 0,
        sq: ADMIN_SQ,
        cq: ADMIN_CQ,
        entries: ADMIN_ENTRIES,
        depth: 1,
        dstrd,
        shadow: None,
    };
    DriveQueue::new(memory, addresses, place, false)
}

/// The admin queue while the drive is brought up.
pub(super) struct Admin<'a> {
    pub(super) device: &'a mut dyn DrivenFunction,
    pub(super) queue: DriveQueue,
    /// The address of the shared memory.
    pub(super) iova: u64,
}

impl Admin<'_> {
    pub(super) fn run(
        &mut self,
        name: &'static str,
        sqe: Sqe,
        opcode: AdminOpcode,
    ) -> Result<(), DriveError> {
        self.ask(name, sqe, opcode).map(drop)
    }

    /// The same, with what the drive answers.
    pub(super) fn ask(
        &mut self,
        name: &'static str,
        mut sqe: Sqe,
        opcode: AdminOpcode,
    ) -> Result<Completed, DriveError> {
        sqe.cdw0.set_opcode(opcode as u8);
        self.queue.push(sqe)?;
        self.queue.ring(self.device)?;
        wait(&mut self.queue, self.device, name)
    }

    /// What the drive says of itself; whether it takes SGLs, and has shadow doorbells.
    pub(super) fn identify(
        &mut self,
        memory: &SharedMemory,
    ) -> Result<(DriveInfo, bool, bool), DriveError> {
        let mut controller = IdentifyController::new_zeroed();
        self.identify_into(memory, id::CNS_CONTROLLER, 0, controller.as_mut_bytes())?;
        let mut namespace = IdentifyNamespace::new_zeroed();
        self.identify_into(memory, id::CNS_NAMESPACE, 1, namespace.as_mut_bytes())?;
        let format = namespace.lbaf[usize::from(namespace.flbas & 0xf)];
        if format.ms != 0 || !(9..=12).contains(&format.lbads) {
            return Err(DriveError::Unsupported("its blocks have metadata or an unusual size"));
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        let max_transfer = match controller.mdts {
            0 => 1 << 20,
            power => PAGE << power.min(8),
        };
        let info = DriveInfo {
            serial: text(&controller.sn),
            model: text(&controller.mn),
            block_size: 1 << format.lbads,
            blocks: namespace.nsze,
            max_transfer,
            volatile_cache: controller.vwc & id::VWC_PRESENT != 0,
        };
        let sgl = controller.sgls & 0b11 != 0;
        Ok((info, sgl, controller.oacs & id::OACS_DOORBELL_BUFFER != 0))
    }

    fn identify_into(
        &mut self,
        memory: &SharedMemory,
        cns: u8,
        nsid: u32,
        out: &mut [u8],
    ) -> Result<(), DriveError> {
        let dptr = [self.iova + IDENTIFY as u64, 0];
        let sqe = Sqe { nsid, dptr, cdw10: u32::from(cns), ..Sqe::default() };
        self.run("identify", sqe, AdminOpcode::Identify)?;
        if let Some(page) = memory.whole().part(IDENTIFY, PAGE) {
            page.copy_to(out);
        }
        Ok(())
    }

    /// Offers the shadow pages; returns where they are.
    pub(super) fn shadow_doorbells(&mut self) -> Result<(usize, usize), DriveError> {
        let dptr = [self.iova + SHADOW_VALUES as u64, self.iova + SHADOW_EVENTS as u64];
        let sqe = Sqe { dptr, ..Sqe::default() };
        self.run("doorbell buffer config", sqe, AdminOpcode::DoorbellBufferConfig)?;
        Ok((SHADOW_VALUES, SHADOW_EVENTS))
    }

    pub(super) fn create_queues(&mut self, place: PairLayout) -> Result<(), DriveError> {
        let size = |entries: u16| {
            let cdw10 = QueueCdw10::new().with_qid(place.id).with_qsize(entries - 1);
            u32::from(cdw10)
        };
        let cq = Sqe {
            cdw10: size(place.entries * CQ_FACTOR),
            cdw11: CreateCqCdw11::new().with_pc(true).into(),
            dptr: [self.iova + place.cq as u64, 0],
            ..Sqe::default()
        };
        self.run("create completion queue", cq, AdminOpcode::CreateCq)?;
        let sq = Sqe {
            cdw10: size(place.entries),
            cdw11: CreateSqCdw11::new().with_pc(true).with_cqid(place.id).into(),
            dptr: [self.iova + place.sq as u64, 0],
            ..Sqe::default()
        };
        self.run("create submission queue", sq, AdminOpcode::CreateSq)
    }
}
