//! What a driver notices when a node is restarted in place: its longest operation meanwhile.

use std::time::Instant;

use super::{Bench, DATA};
use crate::rack::BenchRack;
use crate::{BenchError, lent};

impl Bench<'_> {
    /// The longest read of a driver while the node of its lender, or of its borrower, is restarted. The
    /// borrower's node only passes registers on: a busy queue goes on without it.
    pub(super) fn restarts(&mut self, rack: &BenchRack) -> Result<(), BenchError> {
        for (case, host) in [
            ("rack: longest read, lender restarted", "alpha"),
            ("rack: longest read, borrower restarted", "beta"),
        ] {
            if !self.wanted(case) {
                continue;
            }
            let lease = rack.borrow_drive()?;
            let mut drive = lent::open(&lease.socket, DATA)?;
            let mut block = vec![0; 4096];
            let longest = || {
                std::thread::scope(|scope| {
                    let restart = scope.spawn(|| rack.restart(host));
                    let mut longest = 0.0f64;
                    while !restart.is_finished() {
                        let begun = Instant::now();
                        drive.read(0, &mut block)?;
                        longest = longest.max(begun.elapsed().as_secs_f64() * 1e3);
                    }
                    let restarted = restart.join();
                    restarted.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                    Ok(longest)
                })
            };
            let limit = || Ok(50.0);
            self.pairs(case, "limit", "ms", longest, limit, |ours, limit| ours / limit)?;
            drop(drive);
            rack.give_back(&lease)?;
        }
        Ok(())
    }
}
