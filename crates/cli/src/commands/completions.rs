//! `rackbus completions`: for the shell.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::output::Failure;

/// Print completions for a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus completions bash > /etc/bash_completion.d/rackbus
  rackbus completions zsh > ~/.zfunc/_rackbus")]
pub struct Args {
    /// The shell that the completions are for.
    shell: Shell,
}

impl Args {
    pub fn run(&self) -> Result<(), Failure> {
        clap_complete::generate(self.shell, &mut Cli::command(), "rackbus", &mut std::io::stdout());
        Ok(())
    }
}
