//! `rackbus completions`: for the shell, and the manual.

use std::path::PathBuf;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::output::{Failure, Output};

/// Print completions for a shell, or write the manual.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus completions bash > /etc/bash_completion.d/rackbus
  rackbus completions zsh > ~/.zfunc/_rackbus
  rackbus completions --man /usr/local/share/man/man1")]
pub struct Args {
    /// The shell that the completions are for.
    #[arg(required_unless_present = "man", conflicts_with = "man")]
    shell: Option<Shell>,
    /// Write a page of the manual for each command into this folder.
    #[arg(long, value_name = "DIR")]
    man: Option<PathBuf>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let mut command = Cli::command();
        if let Some(folder) = &self.man {
            let written = clap_mangen::generate_to(command, folder);
            return written.map_err(|cause| {
                let error = format!("{}: {cause}", folder.display());
                Failure::new(error, "name a folder that can be written to")
            });
        }
        if let Some(shell) = self.shell {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut command, "rackbus", &mut text);
            output.bytes(&text);
        }
        Ok(())
    }
}
