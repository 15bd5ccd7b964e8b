//! The program that chooses the queue of each frame that the kernel sends by a TAP device (`TUNSETSTEERINGEBPF`).
//!
//! Without one the kernel sends a flow by the queue that its last answer came by, and goes back to a queue of its own
//! choice after three seconds without one (`tun_flow_update` in Linux, drivers/net/tun.c). So a flow moves from one queue to
//! another while frames lie in both, and its later frames overtake the earlier ones. By this program a flow has one queue
//! for good.
//!
//! A flow of TCP is told by addresses and ports. All else is told by addresses alone: datagrams of UDP may come in
//! fragments, of which only the first has ports, and those of a flow that come whole are to stay among them.

use std::io;
use std::os::fd::OwnedFd;

use crate::bpf::{Instruction, instruction, load};

/// A program that is run with a frame, and reads it (`BPF_PROG_TYPE_SOCKET_FILTER`).
const PROG_TYPE_SOCKET_FILTER: u32 = 1;

/// Registers: what loads from the frame give, its context as loads have it, and two that loads keep.
const LOADED: u8 = 0;
const CONTEXT: u8 = 6;
const HASH: u8 = 7;
const OTHER: u8 = 8;

/// Operations with a number behind, and with a register: of 64 and of 32 bits.
const AND: u8 = 0x57;
const SHIFT_LEFT: u8 = 0x67;
const SHIFT_RIGHT: u8 = 0x77;
const MOVE_NUMBER: u8 = 0xb7;
const MOVE: u8 = 0xbf;
const XOR: u8 = 0xaf;
const MULTIPLY_32: u8 = 0x24;
const SHIFT_RIGHT_32: u8 = 0x74;
/// Loads from the frame in the network's order of bytes. One beyond its end ends the program with 0: the first queue.
const LOAD_WORD: u8 = 0x20;
const LOAD_HALF: u8 = 0x28;
const LOAD_BYTE: u8 = 0x30;
/// The same from where a register says.
const LOAD_WORD_AT: u8 = 0x40;
const JUMP: u8 = 0x05;
const JUMP_IF_EQUAL: u8 = 0x15;
const JUMP_UNLESS_EQUAL: u8 = 0x55;
const EXIT: u8 = 0x95;

const TCP: i32 = 6;
/// By which the bits of a flow are spread: 2^32 divided by the golden ratio.
const SPREAD: i32 = 0x9e37_79b1_u32 as i32;

/// Where the parts of a frame are that has no VLAN tag among its bytes: the kernel keeps the outer one beside it.
const KIND: i32 = 12;
const NETWORK: i32 = 14;
const IPV4_FRAGMENT: i32 = NETWORK + 6;
const IPV4_PROTOCOL: i32 = NETWORK + 9;
const IPV4_ADDRESSES: i32 = NETWORK + 12;
const IPV6_NEXT: i32 = NETWORK + 6;
const IPV6_ADDRESSES: i32 = NETWORK + 8;
const IPV6_PAYLOAD: i32 = NETWORK + 40;

fn load_from(code: u8, at: i32) -> Instruction {
    instruction(code, 0, 0, at)
}

fn of_number(code: u8, to: u8, value: i32) -> Instruction {
    instruction(code, to, 0, value)
}

fn of_register(code: u8, to: u8, from: u8) -> Instruction {
    instruction(code, from << 4 | to, 0, 0)
}

/// Goes on so many instructions later, by what was loaded.
fn jump(code: u8, value: i32, over: usize) -> Instruction {
    instruction(code, LOADED, over as i16, value)
}

/// The hash of so many words at a place.
fn hash_words(at: i32, words: i32) -> Vec<Instruction> {
    let mut code = vec![of_number(MOVE_NUMBER, HASH, 0)];
    for word in 0..words {
        code.push(load_from(LOAD_WORD, at + 4 * word));
        code.push(of_register(XOR, HASH, LOADED));
    }
    code
}

/// Adds both ports, which were loaded, to the hash, the same in both directions.
fn hash_ports() -> [Instruction; 5] {
    [
        of_register(MOVE, OTHER, LOADED),
        of_number(SHIFT_RIGHT, OTHER, 16),
        of_register(XOR, LOADED, OTHER),
        of_number(AND, LOADED, 0xffff),
        of_register(XOR, HASH, LOADED),
    ]
}

/// What is done for IPv4: the last instruction is followed by the end.
fn of_ipv4() -> Vec<Instruction> {
    let mut ports = vec![
        load_from(LOAD_BYTE, NETWORK),
        of_number(AND, LOADED, 0xf),
        of_number(SHIFT_LEFT, LOADED, 2),
        of_register(MOVE, OTHER, LOADED),
        instruction(LOAD_WORD_AT, OTHER << 4, 0, NETWORK),
    ];
    ports.extend(hash_ports());
    let mut code = hash_words(IPV4_ADDRESSES, 2);
    code.extend([
        load_from(LOAD_HALF, IPV4_FRAGMENT),
        of_number(AND, LOADED, 0x3fff),
        jump(JUMP_UNLESS_EQUAL, 0, ports.len() + 2),
        load_from(LOAD_BYTE, IPV4_PROTOCOL),
        jump(JUMP_UNLESS_EQUAL, TCP, ports.len()),
    ]);
    code.extend(ports);
    code
}

fn of_ipv6() -> Vec<Instruction> {
    let mut ports = vec![load_from(LOAD_WORD, IPV6_PAYLOAD)];
    ports.extend(hash_ports());
    let mut code = hash_words(IPV6_ADDRESSES, 8);
    code.push(load_from(LOAD_BYTE, IPV6_NEXT));
    code.push(jump(JUMP_UNLESS_EQUAL, TCP, ports.len()));
    code.extend(ports);
    code
}

/// The program. The kernel takes what it answers, 16 bits, modulo the number of queues.
fn instructions() -> Vec<Instruction> {
    let (v4, v6) = (of_ipv4(), of_ipv6());
    let mut code = vec![of_register(MOVE, CONTEXT, 1), load_from(LOAD_HALF, KIND)];
    // What is no IP is one flow.
    code.extend([
        jump(JUMP_IF_EQUAL, 0x0800, 3),
        jump(JUMP_IF_EQUAL, 0x86dd, 3 + v4.len()),
        of_number(MOVE_NUMBER, LOADED, 0),
        instruction(EXIT, 0, 0, 0),
    ]);
    let over_v6 = v6.len();
    code.extend(v4);
    code.push(instruction(JUMP, 0, over_v6 as i16, 0));
    code.extend(v6);
    code.extend([
        of_register(MOVE, LOADED, HASH),
        of_number(MULTIPLY_32, LOADED, SPREAD),
        of_number(SHIFT_RIGHT_32, LOADED, 16),
        instruction(EXIT, 0, 0, 0),
    ]);
    code
}

/// Loads the program that chooses queues into the kernel; the descriptor keeps it there.
///
/// # Errors
/// The system's: `PermissionDenied` without the right to.
pub(super) fn program() -> io::Result<OwnedFd> {
    load(PROG_TYPE_SOCKET_FILTER, 0, b"rackbus_queue\0\0\0", &instructions())
}
