//! `rackbus login`: exchanges a token for a certificate, by which a person is known from then on.

use std::path::PathBuf;

use rackbus_control::ControlClient;
use rackbus_control::people::LoginRequest;
use rackbus_identity::{CertificateRequest, Token, joining_config};

use crate::Common;
use crate::commands::context::described;
use crate::contexts::{self, AGAIN, ContextStore, Noted, unusable};
use crate::output::{Failure, Output};
use crate::remote::{OTHER_TOKEN, address_of, not_reached};

/// Log in to a rack whose control plane is on other machines, with a token that an administrator has made. The rack
/// becomes a context, which is the current one from then on.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus login https://control:7420 --token-file ann.token
  rackbus login https://c1:7420,https://c2:7420 --token-file ann.token --context lab
  rackbus whoami

The token comes from `rackbus token --user ann --role operator`. It is good once. The certificate is kept in
~/.config/rackbus, and renewed by itself when it is used.")]
pub struct Args {
    /// Where the control plane is; each of several, of which one leads.
    #[arg(required = true, value_name = "URL,…", value_delimiter = ',')]
    control: Vec<String>,
    /// The file with the token.
    #[arg(long, value_name = "FILE")]
    token_file: PathBuf,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let servers =
            self.control.iter().map(|url| address_of(url)).collect::<Result<Vec<_>, _>>()?;
        let contexts = ContextStore::own()?;
        if let Some(name) = &common.context {
            contexts::check_name(name)?;
        }
        contexts.prepare()?;
        let path = self.token_file.display();
        let text = std::fs::read_to_string(&self.token_file)
            .map_err(|cause| Failure::usage(format!("{path}: {cause}"), AGAIN))?;
        let token: Token =
            text.parse().map_err(|error| Failure::usage(format!("{path}: {error}"), AGAIN))?;
        let request = CertificateRequest::new().map_err(unusable)?;
        let asked = LoginRequest { token: token.to_string(), request: request.text().to_owned() };
        let client = ControlClient::with_tls(&servers, joining_config(&token));
        let failed = |error| not_reached(error, OTHER_TOKEN);
        let certificates = client.login(&asked).await.map_err(failed)?;
        let credentials = request.answered(&certificates).map_err(unusable)?;
        // The token is used up: what it was exchanged for is kept before anything else can fail.
        let rack = credentials.rack().unwrap_or_else(|| "rack".to_owned());
        let name = common.context.clone().unwrap_or_else(|| contexts::name_for(&rack));
        let noted = Noted { rack: rack.clone(), control_planes: servers.clone() };
        let context = contexts.put(&name, noted, &credentials)?;
        contexts.set_current(Some(&name))?;
        // Where the other control planes are, and what the rack says of the user, is good to know.
        let client = ControlClient::with_tls(&servers, credentials.client().clone());
        let known = async {
            let known = client.whoami().await.map_err(failed)?;
            context.learn(&client.control().await.map_err(failed)?.members)?;
            Ok::<_, Failure>(known.asker.to_string())
        };
        let asker = known.await.unwrap_or_else(|failure| {
            output.progress(&format!("rackbus: you are logged in, but {}", failure.error));
            credentials.subject().to_string()
        });
        let context = contexts.get(&name)?;
        let shown = described(&context, true)?;
        output.result(&shown, |o| {
            let until = contexts::moment(credentials.certified().until);
            o.line(&format!("you are {asker} in rack {rack}, until {until}"));
            o.line(&format!(
                "commands are for context {name} from now on; `rackbus context use local` for the rack of this machine"
            ));
        });
        Ok(())
    }
}
