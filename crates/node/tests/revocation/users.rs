//! Programs that keep operations of a borrowed function in flight until the function is gone, one for each class. Each
//! returns when every operation that it began has ended, or its function answers as an absent one does.

use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rackbus_devices::memory::BAR;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_driver::net::{Net, NetOptions};
use rackbus_driver::{Drive, DriveOptions, DrivenFunction};
use rackbus_pci::vfio_user::Client;
use rackbus_spec::accel::{Descriptor, Operation};
use rackbus_spec::nvme::{IoOpcode, registers};
use rackbus_spec::vfio_user::region;
use rackbus_spec::virtio::net::NetHeader;

/// Far above what anything here takes: beyond it, it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a drive, and of a memory function, that users write.
pub const WRITTEN: usize = 64 << 10;
/// Bytes of a command of a drive, and how many blocks these are.
const PIECE: usize = 4 << 10;
const BLOCKS: u32 = (PIECE / 512) as u32;
/// The memory function's size.
const MEMORY: u64 = 1 << 20;
/// Bytes of a message for an accelerator.
pub const MESSAGE: usize = 1 << 20;
/// Addresses of the network functions: the one that sends, and the one that receives.
const ADDRESSES: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
/// Bytes of a frame.
const FRAME: usize = 1000;

/// A user of the function at a socket, with what it writes, and who is told of operations that have ended well.
pub type User = fn(&Path, u8, Sender<()>);

pub fn open_drive(socket: &Path) -> Drive {
    Drive::open(socket, DriveOptions::default()).unwrap()
}

/// Whether a drive's registers are those of an absent function.
fn is_absent(device: &mut dyn DrivenFunction) -> bool {
    let mut status = [0; 4];
    device.read(registers::CSTS, &mut status).is_err() || status == [0xff; 4]
}

/// Writes `mark` to the first blocks of a drive, with as many commands in flight as its queue takes.
pub fn of_drive(socket: &Path, mark: u8, begun: Sender<()>) {
    let mut drive = open_drive(socket);
    let piece = drive.buffer(0, PIECE).unwrap();
    let (queue, device, _) = drive.parts();
    queue.data(piece).unwrap().fill(mark);
    let (mut next, mut fails, mut last) = (0, false, Instant::now());
    loop {
        while !fails && queue.in_flight() < queue.depth() {
            let lba = next % (WRITTEN / PIECE) * BLOCKS as usize;
            queue.submit(IoOpcode::Write, lba as u64, BLOCKS, piece, false).unwrap();
            next += 1;
        }
        if queue.ring(device).is_err() {
            return;
        }
        match queue.poll(device) {
            Ok(Some(completed)) => {
                fails |= !completed.status.is_success();
                last = Instant::now();
                let _ = (!fails).then(|| begun.send(()));
            }
            Ok(None) if queue.in_flight() == 0 || is_absent(device) => return,
            Ok(None) => assert!(last.elapsed() < PATIENCE, "a command hangs"),
            Err(_) => return,
        }
    }
}

pub fn open_accelerator(socket: &Path) -> Accel {
    let options = AccelOptions { interrupts: false, ..AccelOptions::default() };
    let accel = Accel::open(socket, PATIENCE, options).unwrap();
    // Of 16 values in no order: there is little to find in it for who compresses it, and much to look for.
    let next = |last: &mut u32| {
        *last = last.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some((*last >> 28) as u8)
    };
    let message: Vec<u8> = (0..MESSAGE).scan(1, |last, _| next(last)).collect();
    accel.data(0, MESSAGE).unwrap().copy_from(&message);
    accel
}

/// A message that takes its engine some time.
pub fn long_request(accel: &Accel) -> Descriptor {
    let work = MessageWork { stages: &[(Operation::Deflate, 0)], ..MessageWork::default() };
    accel.describe(&work, (0, MESSAGE), (MESSAGE, MESSAGE)).unwrap()
}

/// Has messages compressed, as many at a time as the queue takes.
pub fn of_accelerator(socket: &Path, _mark: u8, begun: Sender<()>) {
    let mut accel = open_accelerator(socket);
    let (descriptor, mut fails) = (long_request(&accel), false);
    loop {
        while !fails && accel.under_way(0) < accel.depth(0) {
            accel.push(0, &descriptor).unwrap();
        }
        if accel.ring(0).is_err() || accel.under_way(0) == 0 {
            return;
        }
        match accel.wait_for(0, PATIENCE) {
            Ok(Some(completion)) => {
                fails |= completion.status != 0;
                let _ = (!fails).then(|| begun.send(()));
            }
            Ok(None) => panic!("an operation hangs"),
            Err(_) => return,
        }
    }
}

pub fn open_card(socket: &Path) -> Net {
    Net::open(socket, PATIENCE, NetOptions::default()).unwrap()
}

/// A frame to the function that receives, full of `mark`.
pub fn frame(mark: u8) -> Vec<u8> {
    let [from, to] = ADDRESSES;
    let mut frame = [&to[..], &from, &[0x88, 0xb5]].concat();
    frame.resize(FRAME, mark);
    frame
}

/// Sends frames full of `mark`, with as many in flight as the queue takes.
pub fn of_card(socket: &Path, mark: u8, begun: Sender<()>) {
    let mut card = open_card(socket);
    let (frame, mut sent) = (frame(mark), 0);
    loop {
        while card.send(0, &NetHeader::default(), &frame).unwrap() {
            sent += 1;
        }
        // What is in the queue of a function that is gone has ended with it.
        if card.flush(0).is_err() || !matches!(card.is_broken(), Ok(false)) {
            return;
        }
        if card.unsent(0).unwrap() < sent {
            let _ = begun.send(());
        }
    }
}

/// Writes `mark` into memory of another host, and reads it, until it reads as absent memory does; before that, it may
/// read what was emptied, and never what somebody else has written. Where the memory can be mapped, it is, and what is
/// stored by the mapping is stored to the end.
pub fn of_memory(socket: &Path, mark: u8, begun: Sender<()>) {
    let user = Client::connect(socket, PATIENCE).unwrap();
    user.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
    let mapped = user.map_region(BAR.into(), 0, MEMORY).ok();
    let (data, mut found) = ([mark; 4096], [0; 4096]);
    for at in (0..WRITTEN as u64).step_by(data.len()).cycle() {
        if let Some(mapped) = &mapped {
            mapped.slice(at as usize, data.len()).unwrap().copy_from(&data);
        }
        let written = user.write(BAR.into(), at, &data);
        if written.and_then(|()| user.read(BAR.into(), at, &mut found)).is_err() {
            return;
        }
        let expected = |byte: &u8| [mark, 0, 0xff].contains(byte);
        assert!(found.iter().all(expected), "a former user reads {:#x}", found[0]);
        if found == [0xff; 4096] {
            return;
        }
        let _ = begun.send(());
    }
}
