//! `rackbus token`: lets a host on another machine join.

use std::time::Duration;

use serde_json::json;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Make a token with which a host on another machine joins the rack once.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  (umask 077; rackbus token beta >beta.token)     on the control plane's machine; then, on beta's:
  rackbus node --host beta --join https://control:7420 --token-file beta.token
  rackbus token beta --for 10m

Whoever has the token first is the host: give it to nobody else.")]
pub struct Args {
    /// The host that is to join.
    host: String,
    /// For how long the token is good, at most a week.
    #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    time: Duration,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let token = client(common)?.token(&self.host, self.time).await?;
        output.result(&json!({ "host": self.host, "token": token }), |o| o.line(&token));
        Ok(())
    }
}
