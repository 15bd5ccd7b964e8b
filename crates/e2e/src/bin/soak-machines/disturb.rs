//! What happens to machines: their network fails, and their processes die, stall and are replaced.

use std::time::Duration;

use rackbus_e2e::Result;
use rackbus_e2e::soak::Disturbances;
use rackbus_seeds::Random;

use crate::{CONTROL, FUNCTIONS, HOSTS, Soak};

/// The machines of the hosts, and that of the control plane.
const MACHINES: [&str; 4] = [CONTROL, HOSTS[0], HOSTS[1], HOSTS[2]];

/// Disturbs machines, one thing after the other.
pub struct MachineDisturber<'a> {
    soak: &'a Soak,
    done: Disturbances,
}

impl<'a> MachineDisturber<'a> {
    pub fn new(soak: &'a Soak, random: Random) -> MachineDisturber<'a> {
        MachineDisturber { soak, done: Disturbances::new(random) }
    }

    /// Waits a moment, and disturbs.
    pub fn disturb(&mut self) -> Result<()> {
        self.done.pause(700);
        match self.done.random.below(14) {
            0..3 => self.cut(),
            3..5 => self.cut_one_way(),
            5..7 => self.slow(),
            7 => self.flap(),
            8..10 => self.kill(),
            10..12 => self.stall(),
            12 => {
                self.done.count("restarted in place");
                let host = HOSTS[self.done.random.below(HOSTS.len())];
                // It is refused while something is under way.
                drop(self.soak.control.output(&["restart", host])?);
                Ok(())
            }
            _ => {
                self.done.count("withdrawn");
                let function = FUNCTIONS[self.done.random.below(FUNCTIONS.len())];
                drop(self.soak.control.output(&["withdraw", function, "--force"])?);
                self.done.pause(200);
                drop(self.soak.control.output(&["offer", function])?);
                Ok(())
            }
        }
    }

    /// A machine is cut off, now and then for longer than its fronts wait for their links.
    fn cut(&mut self) -> Result<()> {
        self.done.count("cut off");
        let machine = self.machine();
        self.soak.testbed.run(&["cut", machine])?;
        let most_ms = if self.done.random.chance(20) { 8000 } else { 2500 };
        self.done.pause(most_ms);
        self.soak.testbed.run(&["mend", machine])
    }

    /// What one machine sends to another is lost; what that one sends arrives.
    fn cut_one_way(&mut self) -> Result<()> {
        self.done.count("cut off in one direction");
        let from = self.done.random.below(MACHINES.len());
        let to = (from + 1 + self.done.random.below(MACHINES.len() - 1)) % MACHINES.len();
        self.soak.testbed.run(&["cut", MACHINES[from], "--to", MACHINES[to]])?;
        let most_ms = if self.done.random.chance(20) { 8000 } else { 2500 };
        self.done.pause(most_ms);
        self.soak.testbed.run(&["mend", MACHINES[from]])
    }

    /// A machine's cable passes little, and drops the rest.
    fn slow(&mut self) -> Result<()> {
        self.done.count("slow and lossy");
        let machine = self.machine();
        let rates = ["300 kbit/s", "2 Mbit/s", "20 Mbit/s"];
        let rate = rates[self.done.random.below(rates.len())];
        self.soak.testbed.run(&["slow", machine, "--rate", rate])?;
        self.done.pause(3000);
        self.soak.testbed.run(&["mend", machine])
    }

    /// A cable has a bad contact.
    fn flap(&mut self) -> Result<()> {
        self.done.count("flapping");
        let machine = self.machine();
        for _ in 0..2 + self.done.random.below(5) {
            self.soak.testbed.run(&["cut", machine])?;
            self.done.pause(300);
            self.soak.testbed.run(&["mend", machine])?;
            self.done.pause(300);
        }
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        self.done.count("killed");
        let machine = self.machine();
        self.soak.testbed.run(&["kill", machine])?;
        self.done.pause(500);
        self.soak.testbed.run(&["start", machine])
    }

    fn stall(&mut self) -> Result<()> {
        let machine = self.machine();
        let process = self.soak.on(machine).process(machine)?;
        // Now and then for longer than a lease lives.
        self.done.stall(process, 1500, 5000)
    }

    /// All cables are whole, everything runs, and every drive is offered.
    pub fn calm(&mut self) -> Result<()> {
        self.done.go_on();
        for machine in MACHINES {
            self.soak.testbed.run(&["mend", machine])?;
        }
        for machine in MACHINES {
            if self.soak.on(machine).process(machine).is_err() {
                self.soak.testbed.run(&["start", machine])?;
            }
        }
        self.soak.control.wait_hosts(&HOSTS)?;
        for function in FUNCTIONS {
            let limit = Duration::from_secs(60);
            self.soak.control.wait("what was withdrawn is offered", limit, |rack| {
                rack.json(&["offer", function]).ok()
            })?;
        }
        Ok(())
    }

    /// What was done, for people.
    pub fn describe(&self) -> String {
        self.done.describe()
    }

    fn machine(&mut self) -> &'static str {
        MACHINES[self.done.random.below(MACHINES.len())]
    }
}
