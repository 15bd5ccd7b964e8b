//! Drives of a whole rack: lent and borrowed, by either placement, and with metrics read meanwhile.

use std::time::Instant;

use rackbus_devices::nvme::BackingConfig;

use super::{
    As, Bench, DATA, READ_1, READ_32, SEQUENTIAL_8, SEQUENTIAL_WRITE_8, Settings, WRITE_1, fill,
};
use crate::BenchError;
use crate::lent::{self, LenderProcess};
use crate::machine::unpin;
use crate::rack::{self, BenchRack};
use crate::report::{ResultRow, median};

impl Bench<'_> {
    /// The same through the control plane and two nodes, with the command that users have.
    pub(super) fn whole_rack(&mut self) -> Result<(), BenchError> {
        let Settings { dir, .. } = self.settings.clone();
        // What is started is not to inherit where this thread was put.
        unpin();
        let Some(rack) = BenchRack::start(&dir, &rack::lending())? else {
            self.report.left_out("whole rack", "the rackbus binary is not beside this one");
            return Ok(());
        };
        let limit = || Ok(50.0);
        let mut block = vec![0; 4096];
        let first_read = || {
            let start = Instant::now();
            let lease = rack.borrow_drive()?;
            let mut drive = lent::open(&lease.socket, DATA)?;
            drive.read(0, &mut block)?;
            let taken = start.elapsed().as_secs_f64() * 1e3;
            drop(drive);
            rack.give_back(&lease)?;
            Ok(taken)
        };
        self.pairs("rack: borrow to first read", "limit", "ms", first_read, limit, |a, b| a / b)?;
        let offered_again = || {
            let lease = rack.borrow_drive()?;
            drop(lent::open(&lease.socket, DATA)?);
            let start = Instant::now();
            rack.give_back(&lease)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        let case = "rack: return to offered again";
        self.pairs(case, "limit", "ms", offered_again, limit, |a, b| a / b)?;
        self.restarts(&rack)?;
        self.reads_through(&rack)?;
        self.observed(&rack)?;
        self.unpinned_starts(&rack)
    }

    /// The same drive in a file, with its controller at the borrower and at the lender.
    pub(super) fn placements(&mut self) -> Result<(), BenchError> {
        let cases = [
            ("front at borrower: 4k read qd1 file", READ_1, As::Latency),
            ("front at borrower: 4k write qd1 file", WRITE_1, As::Latency),
            ("front at borrower: 4k read qd32 file", READ_32, As::Rate),
            ("front at borrower: 128k seq qd8 file", SEQUENTIAL_8, As::Bandwidth(128 << 10)),
            (
                "front at borrower: 128k seq write qd8 file",
                SEQUENTIAL_WRITE_8,
                As::Bandwidth(128 << 10),
            ),
        ];
        if !cases.iter().any(|(case, ..)| self.wanted(case)) {
            return Ok(());
        }
        let Settings { dir, time, .. } = self.settings.clone();
        unpin();
        let Some(rack) = BenchRack::start(&dir, &rack::lending_files())? else {
            self.report.left_out("placements", "the rackbus binary is not beside this one");
            return Ok(());
        };
        let strict = rack.borrow(&["alpha/nvme0", "--isolation", "strict"])?;
        let direct = rack.borrow(&["alpha/nvme1"])?;
        let mut strict = lent::open(&strict.socket, DATA)?;
        let mut direct = lent::open(&direct.socket, DATA)?;
        fill(&mut strict, time)?;
        fill(&mut direct, time)?;
        for (case, load, kind) in cases {
            let (unit, relate): (_, fn(f64, f64) -> f64) = match kind {
                As::Latency => ("us added", |strict, direct| strict - direct),
                _ => (kind.unit(), |strict, direct| strict / direct),
            };
            self.pairs(
                case,
                "front at lender",
                unit,
                || Ok(kind.figure(lent::run(&mut strict, &load, time)?)),
                || Ok(kind.figure(lent::run(&mut direct, &load, time)?)),
                relate,
            )?;
        }
        Ok(())
    }

    /// Lone reads through the rack, the driver pinned and the engine where it likes.
    fn reads_through(&mut self, rack: &BenchRack) -> Result<(), BenchError> {
        let case = "rack: 4k read qd1 memory";
        if !self.wanted(case) {
            return Ok(());
        }
        let Settings { dir, again, time, .. } = self.settings.clone();
        let lease = rack.borrow_drive()?;
        let mut through = lent::open(&lease.socket, DATA)?;
        let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "memory")?;
        let mut straight = lender.borrow_drive(DATA)?;
        fill(&mut through, time)?;
        fill(&mut straight, time)?;
        self.pairs(
            case,
            "straight from a lender",
            "us",
            || Ok(1e6 / lent::run(&mut through, &READ_1, time)?),
            || Ok(1e6 / lent::run(&mut straight, &READ_1, time)?),
            |rack, lender| rack / lender,
        )?;
        drop(through);
        rack.give_back(&lease)
    }

    /// The same drive through the rack while its metrics are asked for again and again and its events are followed, and
    /// while nobody looks. The runs are longer than others, so that each has several times its metrics asked for.
    fn observed(&mut self, rack: &BenchRack) -> Result<(), BenchError> {
        let every = self.settings.time * 5 / 2;
        let time = 4 * every;
        for (depth, load) in [("qd1", READ_1), ("qd32", READ_32)] {
            let case = format!("rack: 4k read {depth}, observed each {} ms", every.as_millis());
            if !self.wanted(&case) {
                continue;
            }
            let lease = rack.borrow_drive()?;
            let drive = std::cell::RefCell::new(lent::open(&lease.socket, DATA)?);
            fill(&mut drive.borrow_mut(), time)?;
            let rate = || Ok(lent::run(&mut drive.borrow_mut(), &load, time)? / 1e3);
            let observed = || {
                unpin();
                let _observer = rack.observe(every)?;
                rate()
            };
            self.pairs(&case, "not observed", "kIOPS", observed, rate, |with, without| {
                with / without
            })?;
            drop(drive);
            rack.give_back(&lease)?;
        }
        Ok(())
    }

    /// Lone reads through the rack by programs that are started anew, with nothing pinned: the
    /// system puts driver and engine where it likes.
    fn unpinned_starts(&mut self, rack: &BenchRack) -> Result<(), BenchError> {
        const STARTS: usize = 20;
        let name = |nth: usize| format!("rack: 4k read qd1, start {nth} of {STARTS} by time");
        let places = [1, STARTS / 2, STARTS - 1, STARTS];
        if !places.iter().any(|nth| self.wanted(&name(*nth))) {
            return Ok(());
        }
        let Settings { dir, again, time, .. } = self.settings.clone();
        let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "starts")?;
        let mut straight = lender.borrow_drive(DATA)?;
        fill(&mut straight, time)?;
        let (mut starts, mut pinned) = (Vec::new(), Vec::new());
        for _ in 0..STARTS {
            pinned.push(1e6 / lent::run(&mut straight, &READ_1, time)?);
            unpin();
            let lease = rack.borrow_drive()?;
            let mut reader = again.command("reader")?;
            reader.arg("--socket").arg(&lease.socket);
            reader.arg("--time").arg(time.as_millis().to_string());
            let output = reader.output().map_err(BenchError::io("starting a reader"))?;
            let text = String::from_utf8_lossy(&output.stdout);
            let microseconds = text.trim().parse::<f64>();
            starts.push(microseconds.map_err(|_| BenchError::Peer("a reader failed".into()))?);
            rack.give_back(&lease)?;
        }
        starts.sort_by(f64::total_cmp);
        let all: Vec<String> = starts.iter().map(|start| format!("{start:.2}")).collect();
        self.report.note(&format!("20 starts, in us: {}", all.join(" ")));
        let peer = median(&pinned);
        for nth in places {
            let ours = starts[nth - 1];
            self.report.add(ResultRow {
                area: "nvme",
                case: name(nth),
                ours,
                peer,
                peer_name: "straight from a lender, pinned".to_owned(),
                unit: "us",
                ratio: ours / peer,
                runs: STARTS,
            })?;
        }
        Ok(())
    }
}
