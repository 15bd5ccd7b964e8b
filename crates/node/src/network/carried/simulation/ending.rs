//! The end of a simulation: nothing is wrong any more, so frames pass, and whatever did not arrive was counted.

use super::super::SILENCE;
use super::{FUNCTIONS, FlowId, MS, ROOMY, World};

/// Frames of each flow in the end.
const LAST: usize = 20;

impl World<'_> {
    /// All do what there is to do, for so long.
    fn settle(&mut self, nanoseconds: u64) -> Result<(), String> {
        let until = self.now() + nanoseconds;
        while self.now() < until {
            let mut some = true;
            while some {
                some = false;
                for host in 0..2 {
                    self.ask(host);
                    self.dial(host, true);
                    some |= self.run_sending(host)?;
                    for nth in (0..self.hosts[host].receiving.len()).rev() {
                        some |= self.run_receiving(host, nth)?;
                    }
                    let functions = if self.hosts[host].stands_still { 0 } else { FUNCTIONS };
                    for nth in 0..functions {
                        some |= self.take(host, nth, usize::MAX)? > 0;
                    }
                }
            }
            self.pass((nanoseconds / 50).max(1));
        }
        Ok(())
    }

    /// Whoever stood still goes on, and what is connected is fast.
    fn heal(&mut self) {
        for host in &mut self.hosts {
            host.stands_still = false;
            if let Some(run) = &host.sending {
                for pipe in [&run.side.to, &run.side.from] {
                    let mut pipe = pipe.lock().unwrap();
                    (pipe.delay, pipe.room) = (0, ROOMY);
                }
            }
        }
    }

    /// Nobody is woken by the time for another second.
    fn begin_to_sleep(&mut self) {
        let now = self.now();
        for host in &mut self.hosts {
            host.sending.iter_mut().for_each(|run| run.asleep = run.asleep.map(|_| now));
            host.receiving.iter_mut().for_each(|run| run.asleep = run.asleep.map(|_| now));
        }
    }

    /// Nothing is wrong any more: frames pass.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        self.heal();
        // What is silent is found out by the silence of what was sent, and what was lost is asked for again.
        let ids: Vec<FlowId> = self.flows.keys().copied().collect();
        for _ in 0..4 {
            for id in &ids {
                let taken = self.send(*id, 1, 100);
                self.trace(|| format!("{taken} frame of {id:?}"));
            }
            self.settle(4_000 * MS)?;
        }
        for id in &ids {
            self.check_losses(*id)?;
        }
        self.heal();
        self.go_on_after_a_pause(ids[0])?;
        self.pass_by_new_rings(&ids)
    }

    fn check_losses(&self, id: FlowId) -> Result<(), String> {
        let flow = &self.flows[&id];
        if flow.cut {
            return Ok(());
        }
        let lost = self.lost(id);
        match (flow.accepted..=flow.accepted + lost).contains(&(flow.received + lost)) {
            true => Ok(()),
            false => Err(format!("of {id:?}, {flow:?}, {lost} are counted as lost")),
        }
    }

    /// A receiver that stood still until nothing had room gets all of it, and those who carry it are woken.
    fn go_on_after_a_pause(&mut self, id: FlowId) -> Result<(), String> {
        let ahead = self.flows[&id].accepted - self.flows[&id].received;
        self.hosts[1 - id.0].stands_still = true;
        let mut taken = 1;
        while taken > 0 {
            taken = self.send(id, usize::MAX, 9000);
            self.settle(MS)?;
        }
        self.hosts[1 - id.0].stands_still = false;
        self.begin_to_sleep();
        self.settle(SILENCE.as_nanos() as u64 / 2)?;
        let flow = &self.flows[&id];
        match flow.accepted - flow.received == ahead {
            true => Ok(()),
            false => Err(format!("behind a pause, {flow:?} instead of {ahead} fewer")),
        }
    }

    /// Frames of all flows pass by rings that are opened just now.
    fn pass_by_new_rings(&mut self, ids: &[FlowId]) -> Result<(), String> {
        self.begin_to_sleep();
        (0..2).for_each(|host| self.close(host, 0));
        let part = SILENCE.as_nanos() as u64 / 10;
        self.settle(part)?;
        let before: Vec<u64> = ids.iter().map(|id| self.flows[id].received).collect();
        let mut left = vec![LAST; ids.len()];
        for _ in 0..4 {
            for (id, left) in ids.iter().zip(&mut left) {
                *left -= self.send(*id, *left, 9000);
            }
            self.settle(part)?;
        }
        for ((id, before), left) in ids.iter().zip(before).zip(left) {
            let came = self.flows[id].received - before;
            if left > 0 || came != LAST as u64 {
                return Err(format!(
                    "of {LAST} frames of {id:?}, {left} were not taken, {came} came"
                ));
            }
        }
        Ok(())
    }
}
