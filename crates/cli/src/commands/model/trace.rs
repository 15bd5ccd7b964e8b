//! `rackbus model trace`: one job, hop by hop.

use std::path::PathBuf;

use rackbus_model::workload::{HostProfile, TraceStep, Traced, pictures, trace};
use serde::Serialize;

use super::{Case, Source, span, taken_to_be, write};
use crate::output::{Failure, Output};

/// Follow one job of a workload's flow, alone in the rack, from hop to hop.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model trace rack.toml workload.toml
  rackbus model trace rack.toml workload.toml --flow backup --picture backup.svg")]
pub struct Args {
    /// The rack file, with the fabric that packets go through.
    #[arg(value_name = "RACK")]
    rack_file: PathBuf,
    /// The workload file, with the flows that run in it.
    #[arg(value_name = "WORKLOAD")]
    workload_file: PathBuf,
    /// Draw it into this file (SVG).
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Which flow; the first when none is named.
    #[arg(long, value_name = "NAME")]
    flow: Option<String>,
}

#[derive(Debug, Serialize)]
struct Trace {
    flow: String,
    took_ns: f64,
    hosts: Vec<HostProfile>,
    steps: Vec<TraceStep>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let case =
            Case::read(&Source::read(&self.rack_file)?, &Source::read(&self.workload_file)?)?;
        let names: Vec<&str> = case.workload.flows.iter().map(|flow| flow.name.as_str()).collect();
        let flow = self.flow.as_deref().or(names.first().copied()).unwrap_or_default();
        if !names.contains(&flow) {
            let error = format!("the workload has no flow `{flow}`");
            return Err(Failure::usage(error, format!("its flows are {}", names.join(", "))));
        }
        let traced = trace(&case.rack, &case.timing, &case.workload, flow);
        let Traced { steps, took, hosts } = traced.map_err(|failed| case.failure(failed))?;
        if let Some(file) = &self.picture {
            write(file, &pictures::timeline(flow, &steps, took).svg())?;
        }
        let trace = Trace { flow: flow.to_owned(), took_ns: took.ns(), hosts, steps };
        output.result(&trace, |o| {
            let rows = trace.steps.iter().map(|step| {
                vec![
                    step.number.to_string().into(),
                    step.packet.as_str().into(),
                    step.from.as_str().into(),
                    step.to.as_str().into(),
                    span(step.ready_ns).into(),
                    span(step.begin_ns - step.ready_ns).into(),
                    span(step.end_ns - step.begin_ns).into(),
                ]
            });
            o.table(&["packet", "what", "from", "to", "at", "waited", "took"], rows.collect());
            o.line(&format!("{flow}: {} in all", span(trace.took_ns)));
            o.line(&taken_to_be(&trace.hosts));
        });
        Ok(())
    }
}
