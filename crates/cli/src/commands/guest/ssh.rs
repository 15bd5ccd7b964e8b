//! A guest that is reached by SSH: runs a script there as root, with a file on its standard input.
//!
//! The user's own `ssh` does it, with the user's configuration, keys and agent, so what works for `ssh DESTINATION`
//! works here.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::output::Failure;
use crate::shell::quote;

/// How the guest is reached.
#[derive(Debug, clap::Args)]
pub struct Ssh {
    /// Reach the guest by SSH, as root or as who may use sudo without a password: USER@HOST, ssh://USER@HOST:PORT, or
    /// a name of your ssh configuration
    #[arg(long = "ssh", value_name = "DESTINATION", value_parser = destination)]
    pub destination: Option<String>,
    /// An option for ssh, as in its configuration (Port=2222, IdentityFile=KEY); may be repeated
    #[arg(long = "ssh-option", value_name = "OPTION", requires = "destination")]
    options: Vec<String>,
}

/// A destination that begins with a dash would be an option of `ssh`'s.
fn destination(text: &str) -> Result<String, String> {
    match text.is_empty() || text.starts_with('-') {
        true => Err("name a user and a host".to_owned()),
        false => Ok(text.to_owned()),
    }
}

impl Ssh {
    /// Runs a script as root at `destination`, with `input` as its standard input.
    ///
    /// # Errors
    ///
    /// There is no `ssh` here, it does not reach the guest, or the script fails: with what was said on standard error.
    pub fn run(&self, destination: &str, script: &str, input: &Path) -> Result<(), Failure> {
        let input = File::open(input)
            .map_err(|cause| Failure::new(format!("{}: {cause}", input.display()), "try again"))?;
        let made = Command::new("ssh")
            .args(self.options.iter().flat_map(|option| ["-o", option]))
            .args(["-T", "--", destination, &as_root(script)])
            .stdin(input)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .map_err(|cause| Failure::new(format!("ssh: {cause}"), "install an SSH client here"))?;
        if made.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&made.stderr).trim().replace(['\r', '\n'], "; ");
        // What ssh ends with by itself.
        Err(match made.status.code() {
            Some(255) => Failure::new(
                format!("{destination} is not reached: {said}"),
                "see that `ssh` with the same destination and options logs in without a question",
            ),
            _ => Failure::new(
                format!("the guest refuses: {said}"),
                "see to the cause in the guest; who logs in must be root, or may use sudo without a password",
            ),
        })
    }
}

/// A command for whatever shell the user has there: `script` by `sh`, as root.
fn as_root(script: &str) -> String {
    let script = quote(script);
    let chosen =
        format!("if test \"`id -u`\" = 0; then sh -c {script}; else sudo -n sh -c {script}; fi");
    format!("sh -c {}", quote(&chosen))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_destination_is_no_option() {
        assert!(destination("-oProxyCommand=true").is_err());
        assert!(destination("").is_err());
        assert_eq!(destination("root@guest").as_deref(), Ok("root@guest"));
    }

    #[test]
    fn a_script_arrives_as_it_is() {
        let script = "printf %s 'it'\\''s'";
        let root: &[(&str, &str)] = &[("id", "echo 0")];
        for user in [root, &[("id", "echo 5"), ("sudo", "shift; exec \"$@\"")]] {
            let folder = tempfile::tempdir().unwrap();
            for (name, text) in user {
                let program = folder.path().join(name);
                std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
                std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            }
            let path = format!("{}:/usr/bin:/bin", folder.path().display());
            let mut command = Command::new("sh");
            let ran = command.args(["-c", &as_root(script)]).env("PATH", path).output().unwrap();
            assert_eq!(ran.stdout, b"it's", "{user:?}");
        }
    }
}
