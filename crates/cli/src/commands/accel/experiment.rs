//! `rackbus accel experiment`: the observations of the paper that accelerators as a service come from.

use rackbus_qos::simulation::experiments::{Experiment, experiment, is_of_the_bus};

use crate::output::{Failure, Output};

/// Run an observation of "Accelerator-as-a-Service in Public Clouds" (2024) as an experiment: what
/// tenants get without shaping, and with it. In simulated time: nothing else that runs on this machine
/// changes the result.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus accel experiment 4          queue pairs decide who gets what, until tenants are shaped
  rackbus accel experiment            all of them
  rackbus accel experiment 5 --json")]
pub struct Args {
    /// The paper's number of the observation, 1 to 10; without it, all that can be simulated.
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10))]
    observation: Option<u32>,
    /// The seed of what is drawn at random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        if let Some(number) = self.observation.filter(|number| is_of_the_bus(*number)) {
            let error =
                format!("observation {number} is of the PCIe bus, which is not simulated here");
            return Err(Failure::usage(error, "try 1 to 5, 7 or 10"));
        }
        let wanted = |number: &u32| self.observation.is_none_or(|only| only == *number);
        let numbers = (1..=10).filter(wanted);
        let results: Vec<Experiment> =
            numbers.filter_map(|number| experiment(number, self.seed)).collect();
        output.result(&results, |o| {
            for Experiment { observation, title, measure, cases, .. } in &results {
                o.line(&format!("Observation {observation}: {title}"));
                o.line(&format!("{measure}:"));
                let row = |case: &rackbus_qos::simulation::experiments::Case| {
                    let number = |value: f64| format!("{value:.3}").into();
                    vec![case.name.clone().into(), number(case.off), number(case.on)]
                };
                o.table(&["case", "off", "shaped"], cases.iter().map(row).collect());
                o.line("");
            }
        });
        Ok(())
    }
}
