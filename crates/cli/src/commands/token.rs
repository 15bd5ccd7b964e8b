//! `rackbus token`: lets a host on another machine join, or a person log in.

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use rackbus_control::machines::TokenRequest;
use rackbus_control::people::UserTokenRequest;
use rackbus_identity::Role;
use serde_json::json;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Make a token with which a host on another machine joins the rack once, or a person logs in once.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  (umask 077; rackbus token beta >beta.token)     on the control plane's machine; then, on beta's:
  rackbus node --host beta --join https://control:7420 --token-file beta.token
  rackbus token beta --for 10m
  rackbus token beta --life 12h                   its certificates are good for 12 hours, and renewed after 8

  (umask 077; rackbus token --user ann --role operator >ann.token)
  rackbus token --user bob --role borrower --host beta --life 12h
  rackbus login https://control:7420 --token-file ann.token      where ann works

Whoever has the token first is the host, or the person: give it to nobody else.")]
pub struct Args {
    /// The host that is to join.
    #[arg(required_unless_present = "user", conflicts_with = "user")]
    host: Option<String>,
    /// The person that is to log in: lower-case letters, digits and `-`.
    #[arg(long, value_name = "NAME", requires = "role")]
    user: Option<String>,
    /// What the person may do: all; borrow, return and withdraw for all hosts; borrow and return for one host; look.
    #[arg(long, value_name = "ROLE", requires = "user", value_parser = PossibleValuesParser::new(Role::NAMES))]
    role: Option<String>,
    /// The host that a borrower borrows for.
    #[arg(long = "host", value_name = "HOST", requires = "user")]
    borrower_for: Option<String>,
    /// For how long the certificates are good, 30 days at most: a week of a person unless named, 30 days of a host.
    /// A host's are renewed by themselves, a person's when they are used.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    life: Option<Duration>,
    /// For how long the token is good, at most a week.
    #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    time: Duration,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common).await?;
        let (seconds, life_seconds) = (self.time.as_secs(), self.life.map(|life| life.as_secs()));
        let (whose, token) = match (&self.host, &self.user, &self.role) {
            (Some(host), ..) => {
                let asked = TokenRequest { host: host.clone(), seconds, life_seconds };
                (json!({ "host": host }), client.host_token(&asked).await?)
            }
            (None, Some(user), Some(role)) => {
                Role::named(role, self.borrower_for.as_deref())
                    .map_err(|error| Failure::usage(error.to_string(), "see --host"))?;
                let asked = UserTokenRequest {
                    user: user.clone(),
                    role: role.clone(),
                    host: self.borrower_for.clone(),
                    seconds,
                    life_seconds,
                };
                let whose = json!({ "user": user, "role": role, "host": self.borrower_for });
                (whose, client.user_token(&asked).await?)
            }
            _ => {
                return Err(Failure::usage(
                    "a token is for a host or for a user",
                    "name a host or --user",
                ));
            }
        };
        let mut made = whose;
        made["token"] = json!(token);
        output.result(&made, |o| o.line(&token));
        Ok(())
    }
}
