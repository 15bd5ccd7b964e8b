//! The devices that a host can lend, one folder each. A device is a [`Function`]: a state machine
//! that is polled, with memory, interrupts and time handed in.
//!
//! [`Function`]: rackbus_pci::Function

pub mod nvme;
