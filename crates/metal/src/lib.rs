//! Borrowing on bare metal: a function of one physical host in another one's own PCI tree, through the windows of
//! an NTB.
//!
//! The lender is user space: it holds the device and its end of the NTB by VFIO, both in one IOMMU domain that
//! contains the borrower's windows and nothing else. The borrower's kernel module (`kernel/`) makes the function
//! appear there. What they say to each other lies in a control area in the lender's memory.
//!
//! * [`window`]: the control area, as `kernel/include/rackbus_window.h` has it. [`requests`]: what the borrower asks
//!   for. [`image`]: the configuration space that it sees. [`plan`]: which addresses lead where; `room`: which of them are
//!   free. None of them does I/O.
//! * [`ntb`]: an end of an NTB, held by VFIO. [`message_ntb`]: one that is used for messages between two nodes. [`lender`]:
//!   functions that are lent through it, each a `loan` of a `function`: a `device`, which is one of the `machine` or a `model`,
//!   whose registers are in the window's `ranges`. [`messages`]: what a
//!   model's interrupts do (pure). [`isolated`]: what a function reaches that the borrower's VFIO has (pure). `log_pace`: how often a
//!   borrower has a line logged (pure).
//! * [`borrower`]: the kernel module's device file. `reach`: where a borrowed function finds this host's memory.

pub mod borrower;
mod device;
mod error;
mod function;
pub mod image;
pub mod isolated;
pub mod lender;
mod loan;
mod log_pace;
mod machine;
pub mod message_ntb;
pub mod messages;
mod model;
pub mod ntb;
pub mod plan;
mod ranges;
mod reach;
pub mod requests;
mod room;
mod saved;
mod vectors;
pub mod window;

pub use error::MetalError;
pub use function::OnTakenAway;
pub use lender::LentWindow;
pub use loan::{LentStatus, LoanHandle, WindowLoan};
pub use message_ntb::MessageNtb;
pub use reach::window_of;
pub use saved::{LoanState, NtbWindowState, STATE_VERSION, SavedLoan, SavedWindow};
