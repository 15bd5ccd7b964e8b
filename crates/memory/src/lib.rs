//! Shared memory and the ways to reach it: the bytes beneath the data path.
//!
//! Everything here is memory that another process can change, truncate or abandon at any moment.
//! So nothing hands out a reference or a slice to it: [`DmaSlice`] copies, loads and stores through
//! raw pointers that were checked once, against the range a mapping covers, and a file that its
//! owner truncates under us becomes an error ([`guard`]), not a dead process.
//!
//! * [`handle`]: what leads to memory, as the link carries it. [`handles`]: what is passed beside a message.
//! * [`region`]: one `mmap` of somebody's descriptor, and [`SharedMemory`], one of our own.
//! * [`mod@slice`]: checked access to a piece of a region.
//! * [`space`]: [`DmaSpace`], a function's IOMMU domain with the regions behind it.
//! * [`revoker`]: takes away what a function reaches, from any thread.
//! * [`refusals`]: the accesses that were refused to a function.
//! * [`sparse`]: memory files copied and emptied.
//! * [`gate`]: brings the threads of a process to rest.
//! * [`registers`]: those of a device of this machine.
//! * [`event`]: a descriptor that rings (eventfd). [`peer_event`]: one that a peer passed.
//! * [`doorbell`]: interrupts between processes: a count in shared memory, and sleeping on it.
//! * [`ring`]: messages from one process to another, in shared memory.
//! * [`frames`]: Ethernet frames from one process to another, in shared memory.
//! * [`lock`]: locks and barriers between processes, which survive their holders.
//! * [`mod@copy`]: the copy engine: transactions carried out by channels.
//! * [`spin`]: how long to poll before sleeping. [`ticks`]: whether a thread stalled.
//! * [`stream`], [`packets`]: connections that pass handles.
//! * [`threads`]: threads that leave a program's signals to the program.
//! * [`socket`]: sockets that others find by a path. [`file_lock`]: files that one process alone may use.
//! * [`descriptors`]: room for the descriptors that handles are.
//! * [`vectored`]: system calls that move shared memory.
//! * [`window`]: memory of the host's that a process in a virtual machine has through its file system.
//! * [`wiping`]: memory that is zeroed before it is freed.

pub mod copy;
pub mod descriptors;
pub mod doorbell;
pub mod event;
pub mod exchange;
pub mod file_lock;
pub mod frames;
pub mod gate;
pub mod guard;
pub mod handle;
pub mod handles;
pub mod lock;
pub mod merge;
pub mod packets;
pub mod peer_event;
pub mod prompt;
pub mod refusals;
pub mod region;
pub mod registers;
pub mod revoker;
pub mod ring;
pub mod slice;
pub mod socket;
pub mod space;
pub mod sparse;
pub mod spin;
pub mod stream;
mod sync;
pub mod threads;
pub mod ticks;
pub mod vectored;
pub mod window;
pub mod wiping;

pub use doorbell::{DOORBELL_BYTES, Doorbell, WaitError};
pub use event::Event;
pub use exchange::{
    Carried, CarriedSession, Carrier, Exchange, ExchangeError, ExchangeHandles, ExchangeLayout,
    InheritedEnd,
};
pub use frames::{FrameReceiver, FrameSender, FramesLayout};
pub use gate::{Gate, GatePassage};
pub use handle::MemoryHandle;
pub use handles::{AsHandle, HandleError, HandleRef, Handles, ResourceHandle};
pub use packets::{PacketListener, PacketStream, Packets};
pub use peer_event::PeerEvent;
pub use rackbus_fabric::{Access, Lending};
pub use refusals::{RefusalBurst, Refusals};
pub use region::{Region, RegionError, SharedMemory};
pub use registers::MappedRegisters;
pub use revoker::Revoker;
pub use ring::{Consumer, Producer, PushError, RingLayout};
pub use slice::{DmaSlice, PinnedPieces, PinnedSlice};
pub use space::{DmaFault, DmaSpace, MapError, UnmapError};
pub use spin::AdaptiveSpin;
pub use stream::{Stream, StreamError};
