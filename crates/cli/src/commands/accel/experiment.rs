//! `rackbus accel experiment`: the observations of the paper that accelerators as a service come from.

use std::path::PathBuf;

use rackbus_model::picture::compare::{Compared, ComparisonPicture};
use rackbus_model::reproduce::shaped::shaped;
use rackbus_qos::simulation::experiments::{Experiment, ExperimentCase, experiment};

use crate::output::{Failure, Output};

/// Run an observation of "Accelerator-as-a-Service in Public Clouds" (2024) as an experiment: what
/// tenants get without shaping, and with it. In simulated time: engines in a simulation of the arbiter's own, and
/// what is of the PCIe bus in the timing model, with the same arbiter. Nothing else that runs on this machine changes
/// the result.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus accel experiment 4          queue pairs decide who gets what, until tenants are shaped
  rackbus accel experiment 6          the direction of traffic, on the modelled bus
  rackbus accel experiment            all ten
  rackbus accel experiment --pictures pictures/
  rackbus accel experiment 5 --json")]
pub struct Args {
    /// The paper's number of the observation, 1 to 10; without it, all.
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10))]
    observation: Option<u32>,
    /// The seed of what is drawn at random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Draw each into this folder (SVG).
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let wanted = |number: &u32| self.observation.is_none_or(|only| only == *number);
        let of = |number| experiment(number, self.seed).into_iter().chain(shaped(number));
        let results: Vec<Experiment> = (1..=10).filter(wanted).flat_map(of).collect();
        if let Some(folder) = &self.pictures {
            for (name, text) in pictures(&results) {
                let file = folder.join(format!("{name}.svg"));
                std::fs::write(&file, text).map_err(|cause| {
                    let error = format!("{}: {cause}", file.display());
                    Failure::usage(error, "name a folder that there is")
                })?;
            }
        }
        output.result(&results, |o| {
            for Experiment { observation, title, measure, cases, .. } in &results {
                o.line(&format!("Observation {observation}: {title}"));
                o.line(&format!("{measure}:"));
                let row = |case: &ExperimentCase| {
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

/// A picture of each experiment, by name: those of the bus have one of their own where engines have one too.
fn pictures(results: &[Experiment]) -> Vec<(String, String)> {
    let mut pictures: Vec<(String, String)> = Vec::new();
    for Experiment { observation, title, measure, ideal, cases } in results {
        let mut name = format!("observation-{observation}");
        if pictures.iter().any(|(other, _)| *other == name) {
            name += "-bus";
        }
        let cases = cases.iter().map(|case| Compared {
            name: case.name.clone(),
            first: case.off,
            second: case.on,
        });
        let picture = ComparisonPicture {
            title: format!("Observation {observation}: {title}"),
            subtitle: (*measure).to_owned(),
            names: ["without shaping", "shaped"],
            ideal: *ideal,
            cases: cases.collect(),
        };
        pictures.push((name, picture.svg()));
    }
    pictures
}
