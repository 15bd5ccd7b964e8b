//! What went through one end of a bridge: counted by the threads that serve it, read by anybody.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the software of one end did, and what came of it.
        #[derive(Debug, Default)]
        pub struct BridgeCounters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        /// The same as numbers.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct BridgeCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl BridgeCounters {
            /// What they are now.
            pub fn get(&self) -> BridgeCounts {
                BridgeCounts { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }

        impl BridgeCounts {
            /// Names and numbers, in order.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

/// A number that grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts one more of what it counts.
    pub fn count(&self) {
        self.add(1);
    }

    /// So many times more.
    pub fn add(&self, times: u64) {
        self.0.fetch_add(times, Ordering::Relaxed);
    }
}

counters! {
    /// Accesses to registers that trapped.
    register_reads,
    /// Writes of registers, by either end.
    register_writes,
    /// Reads of the first window that trapped.
    window1_reads,
    /// Writes to the first window.
    window1_writes,
    /// Reads of the second window that trapped: none where it is the peer's memory, mapped.
    window2_reads,
    /// Writes to the second window that trapped.
    window2_writes,
    /// Accesses that found the peer's memory mapped here, and asked nobody.
    direct,
    /// Writes that were sent to the peer's machine and not waited for.
    posted,
    /// Reads that were sent to the peer's machine.
    reads,
    /// Requests that the peer's machine did not answer in time.
    timeouts,
    /// Writes that went nowhere, and reads that were answered with all ones.
    dropped,
    /// Doorbells of the peer's that were rung.
    doorbells,
    /// Interrupts that this end raised in its own machine.
    interrupts,
}
