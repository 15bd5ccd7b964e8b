//! What a node [answers](crate::node) about who reaches what.
//!
//! The answer is read from the node's fabric when it is asked for: where a range leads is what
//! [`Fabric::route`] says, which the timing model walks as well.

use rackbus_fabric::{Access, Fabric, FunctionInterrupt, Place, Reached};
use serde::{Deserialize, Serialize};

use crate::api::{ApiError, Hop};
use crate::service::paths::hops;
use crate::service::views::problem;

/// A range that a function, or the processors of a host, reach now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReachedRange {
    /// What its user calls its first byte: for a function, the address that its driver gave it; for one of its
    /// interrupts, where its entry is in the table of interrupt remapping.
    pub at: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Whether it may be read.
    pub read: bool,
    /// Whether it may be written.
    pub write: bool,
    /// Whose memory, interrupt or BAR it leads to.
    #[serde(flatten)]
    pub to: ReachedPlace,
    /// The way there, both ends included: it begins with who accesses.
    pub components: Vec<Hop>,
}

/// Where a range leads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "to", rename_all = "snake_case")]
pub enum ReachedPlace {
    /// Memory that a process of a host lends: a guest's, a driver's.
    Lent {
        /// Name of the host whose process lends it.
        host: String,
        /// Bytes from the beginning of the file that the memory is in.
        offset: u64,
    },
    /// Memory that a host exports: a segment or pages.
    Exported {
        /// Name of the host that exports it.
        host: String,
        /// Bytes from the beginning of what it exports.
        offset: u64,
    },
    /// An interrupt that other hosts may trigger.
    Interrupt {
        /// The host whose process has it.
        host: String,
        /// Its number, by which others connect to it.
        number: u32,
        /// Whether data goes with it.
        data: bool,
    },
    /// What a process has wired to an interrupt of the function.
    Wired {
        /// The host whose process it is.
        host: String,
        /// Number of the vector; nothing for the INTx pin.
        #[serde(skip_serializing_if = "Option::is_none")]
        vector: Option<u16>,
    },
    /// A BAR of a device.
    Bar {
        /// Name of the device, `HOST/DEVICE`.
        device: String,
        /// The BAR, 0 to 5.
        bar: u8,
        /// Bytes from its beginning.
        offset: u64,
    },
    /// Something that only a newer node knows of.
    #[serde(other)]
    Unknown,
}

/// What the function or host `of` reaches by loans of `fabric`.
///
/// # Errors
/// [`ApiError`] when there is no such function or host.
pub fn reached(fabric: &Fabric, of: &str) -> Result<Vec<ReachedRange>, ApiError> {
    let unknown = |error: rackbus_fabric::UnknownPart| {
        problem("unknown_place", error.to_string(), "name a host, or a function as HOST/DEVICE")
    };
    let topology = fabric.topology();
    let range = |it: &Reached| ReachedRange {
        at: it.address,
        length: it.length,
        read: it.access.contains(Access::READ),
        write: it.access.contains(Access::WRITE),
        to: place(fabric, it.route.place),
        components: hops(topology, &it.route.path),
    };
    Ok(fabric.reached(of).map_err(unknown)?.iter().map(range).collect())
}

fn place(fabric: &Fabric, place: Place) -> ReachedPlace {
    let name = |host| fabric.topology().host(host).name.clone();
    match place {
        Place::Lent { host, offset, .. } => ReachedPlace::Lent { host: name(host), offset },
        Place::Memory { host, offset } => ReachedPlace::Exported { host: name(host), offset },
        Place::Interrupt { host, number, data } => {
            ReachedPlace::Interrupt { host: name(host), number, data }
        }
        Place::Wired { host, interrupt } => {
            let vector = match interrupt {
                FunctionInterrupt::Vector(vector) => Some(vector),
                FunctionInterrupt::Pin => None,
            };
            ReachedPlace::Wired { host: name(host), vector }
        }
        Place::Bar { device, bar, offset } => {
            let device = fabric.topology().component(device).name.clone();
            ReachedPlace::Bar { device, bar, offset }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_a_newer_node_is_understood_as_far_as_it_is_known() {
        let answer = r#"[
            {"at": 4096, "length": 8, "read": true, "write": false, "to": "pooled", "pool": 3, "components": []},
            {"at": 4, "length": 4, "read": false, "write": true, "to": "wired", "host": "beta", "vector": 1, "components": []}
        ]"#;
        let ranges: Vec<ReachedRange> = serde_json::from_str(answer).unwrap();
        assert_eq!((ranges[0].at, &ranges[0].to), (4096, &ReachedPlace::Unknown));
        let wired = ReachedPlace::Wired { host: "beta".to_owned(), vector: Some(1) };
        assert_eq!(ranges[1].to, wired);
    }
}
