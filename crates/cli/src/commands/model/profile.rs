//! `rackbus model profile`: a profile of one's own host, from the output of usual tools.

use std::path::PathBuf;

use rackbus_model::timing::measured::profile;
use rackbus_model::timing::profiles::{USUAL, all};

use super::{Source, misread};
use crate::output::{Failure, Output};

/// Make a host's profile of what tools measured on it, and name what stays unknown.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mlc --latency_matrix > mlc.txt; stream > stream.txt
  rackbus model profile mine mlc.txt stream.txt --like ice-lake >> rack.toml
  rackbus model profile mine lat_mem_rd.txt lat_dma_sizes.txt fio.json

Then write profile = \"mine\" for the hosts that are like it. The tools are Intel MLC, lmbench's lat_mem_rd,
STREAM, pcie-bench's text and fio's JSON.")]
pub struct Args {
    /// What to call it.
    #[arg(value_name = "NAME")]
    name: String,
    /// Files with what the tools printed.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// The profile that has what was not measured.
    #[arg(long, value_name = "PROFILE", default_value = USUAL)]
    like: String,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        if !rackbus_fabric::rack::is_name(&self.name) || all().contains_key(&self.name) {
            let error = format!("`{}` is no name for a profile", self.name);
            let remedy = "choose one of lower-case letters, digits and `-` that no profile has";
            return Err(Failure::usage(error, remedy));
        }
        let sources = self.files.iter().map(|file| Source::read(file));
        let sources = sources.collect::<Result<Vec<_>, _>>()?;
        let files: Vec<(String, String)> =
            sources.into_iter().map(|source| (source.name, source.text)).collect();
        let Some(made) = profile(&self.name, &self.like, &files) else {
            let known: Vec<&str> = all().keys().map(String::as_str).collect();
            let error = format!("there is no profile `{}`", self.like);
            return Err(Failure::usage(error, format!("they are {}", known.join(", "))));
        };
        let made = made.map_err(misread)?;
        output.result(&made, |o| o.line(made.text().trim_end()));
        Ok(())
    }
}
