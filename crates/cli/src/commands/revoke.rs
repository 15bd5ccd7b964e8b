//! `rackbus revoke`: takes certificates back before they are over.

use rackbus_control::certificates::RevokeRequest;
use rackbus_identity::Serial;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Revoke the certificates of a host's machine or of a person, or one certificate. They are refused at once, by the
/// control plane and by all nodes, and connections by them are ended.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus revoke host beta        its machine was stolen; a new token lets another one join
  rackbus revoke user ann         whatever role she has; unused tokens are of no more use, too
  rackbus revoke serial 5c1f0e9a77d3b210      one certificate: see `rackbus certificates`")]
pub struct Args {
    #[command(subcommand)]
    what: RevokeTarget,
}

#[derive(Debug, clap::Subcommand)]
enum RevokeTarget {
    /// All certificates of a host's node.
    Host { name: String },
    /// All certificates of a person.
    User { name: String },
    /// The certificate with this number.
    Serial { number: Serial },
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let none = RevokeRequest::default();
        let (asked, what) = match &self.what {
            RevokeTarget::Host { name } => {
                (RevokeRequest { host: Some(name.clone()), ..none }, format!("host {name}"))
            }
            RevokeTarget::User { name } => {
                (RevokeRequest { user: Some(name.clone()), ..none }, format!("user {name}"))
            }
            RevokeTarget::Serial { number } => (
                RevokeRequest { serial: Some(number.to_string()), ..none },
                format!("certificate {number}"),
            ),
        };
        let done = client(common).await?.revoke(&asked).await?;
        if done.certificates == 0 && done.tokens == 0 {
            let remedy = "`rackbus certificates` lists those that are good";
            output.progress(&format!("rackbus: nothing that is good is of {what}; {remedy}"));
        }
        output.result(&done, |o| {
            let (certificates, tokens) = (done.certificates, done.tokens);
            o.line(&format!(
                "{what} is revoked: {certificates} certificates that were good, {tokens} tokens"
            ));
        });
        Ok(())
    }
}
