//! Functions that another program serves by vfio-user: what the rack file says of one.
//!
//! The program may be any vfio-user server: SPDK's, QEMU's, another node's, a model of one's own. It is
//! listening at a socket, or the node runs it for each user anew.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rackbus_fabric::rack::DeviceSection;
use rackbus_fabric::text::{Parsed, Section, wrong};
use rackbus_pci::Function;

use crate::class::{Class, DeviceConfig};
use crate::place::Folders;

/// Name of the class.
pub const CLASS: &str = "upstream";

/// The class of functions that another program serves.
#[derive(Debug)]
pub struct UpstreamClass;

impl Class for UpstreamClass {
    fn name(&self) -> &'static str {
        CLASS
    }

    fn read(&self, section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(&["kind", "socket", "command"])?;
        Ok(Some(Arc::new(UpstreamSection::read(&keys)?)))
    }
}

/// Where the server of a function is, and how it is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamServer {
    /// The socket that it listens at.
    pub socket: PathBuf,
    /// The program and its arguments, where the node runs it for each user.
    pub command: Option<Vec<String>>,
    /// The folder that the program is run in.
    pub folder: PathBuf,
}

/// Such a function as the rack file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct UpstreamSection {
    socket: PathBuf,
    command: Option<Vec<String>>,
}

impl UpstreamSection {
    fn read(section: &Section<'_>) -> Parsed<UpstreamSection> {
        let (socket, place) = section.require("socket", section.text("socket", SOCKET)?, SOCKET)?;
        if !socket.contains('/') {
            return wrong(place, format!("`socket` is {socket:?}"), SOCKET);
        }
        let command = section.texts("command", COMMAND)?;
        if let Some((words, place)) = &command
            && words.first().is_none_or(|program| program.is_empty())
        {
            return wrong(place.clone(), "`command` names no program".to_owned(), COMMAND);
        }
        let command = command.map(|(words, _)| words);
        Ok(UpstreamSection { socket: PathBuf::from(socket), command })
    }
}

impl DeviceConfig for UpstreamSection {
    fn detail(&self) -> String {
        match &self.command {
            Some(command) => {
                format!("{}, run for each user: {}", self.socket.display(), command[0])
            }
            None => self.socket.display().to_string(),
        }
    }

    fn model(&self, _folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        Err(std::io::Error::other("another program runs this function"))
    }

    fn resume(
        &self,
        folders: &Folders,
        _medium: Vec<OwnedFd>,
    ) -> std::io::Result<Box<dyn Function>> {
        self.model(folders)
    }

    fn upstream(&self, folders: &Folders) -> Option<UpstreamServer> {
        Some(UpstreamServer {
            socket: folders.rack.join(&self.socket),
            command: self.command.clone(),
            folder: folders.rack.clone(),
        })
    }
}

const SOCKET: &str =
    "`socket` is the path of a vfio-user server's socket, with a `/` in it (\"/run/spdk/cntrl\")";
const COMMAND: &str = "`command` is the server's program and its arguments, each a text \
                       ([\"/usr/bin/server\", \"--socket=/run/server.sock\"])";

#[cfg(test)]
mod tests {
    use crate::class::parse_rack;

    fn refused(keys: &str) -> String {
        let text = format!("name = \"lab\"\n[hosts.a.devices.d]\nkind = \"upstream\"\n{keys}");
        parse_rack("rack.toml", &text).unwrap_err().to_string()
    }

    #[test]
    fn a_section_that_names_no_server_is_refused_where_it_is_wrong() {
        for (keys, said) in [
            ("", "rack.toml:2:18: "),
            ("socket = \"server\"\n", "rack.toml:4:10: `socket` is \"server\"; "),
            ("socket = \"./s\"\ncommand = []\n", "rack.toml:5:11: `command` names no program; "),
            ("socket = \"./s\"\ncommand = [1]\n", "rack.toml:5:12: "),
            ("socket = \"./s\"\nsize = 1\n", "rack.toml:5:1: unknown key `size`"),
        ] {
            let refused = refused(keys);
            assert!(refused.starts_with(said), "{keys}: {refused}");
        }
    }
}
