//! The way from one place of the rack to another.

use rackbus_fabric::ComponentId;

use super::Service;
use super::views::problem;
use crate::api::{ApiError, Hop, Path};

impl Service {
    /// The way that memory accesses take from a host's processor or a function to a host's memory
    /// or a function.
    ///
    /// # Errors
    /// [`ApiError`] when a name is unknown, or the two are not joined.
    pub fn path(&self, from: &str, to: &str) -> Result<Path, ApiError> {
        let topology = &self.shared.inventory.topology;
        let part = |name: &str, of_host: fn(&rackbus_fabric::topology::Host) -> ComponentId| {
            let host = topology.host_named(name).map(|id| of_host(topology.host(id)));
            host.or_else(|| topology.named(name)).ok_or_else(|| {
                let known: Vec<&str> =
                    topology.components().map(|(_, c)| c.name.as_str()).collect();
                problem(
                    "unknown_place",
                    format!("rack {} has no {name}", self.shared.inventory.rack),
                    &format!(
                        "it has the hosts {}, and {}",
                        self.shared.inventory.hosts.join(", "),
                        known.join(", ")
                    ),
                )
            })
        };
        let (start, end) = (part(from, |host| host.root)?, part(to, |host| host.memory)?);
        let path = topology.path(start, end).ok_or_else(|| {
            problem(
                "no_way",
                format!("nothing joins {from} and {to}"),
                "see to the links in the rack file",
            )
        })?;
        let mut before = None;
        let components = path.components().iter().map(|id| {
            let component = topology.component(*id);
            let link = before.replace(*id).and_then(|last| topology.link(last, *id));
            Hop {
                kind: component.kind.to_string(),
                name: component.name.clone(),
                link: link.map(|link| link.to_string()),
            }
        });
        Ok(Path {
            from: from.to_owned(),
            to: to.to_owned(),
            components: components.collect(),
            hops: path.hops().len(),
            roots: path.roots(topology),
        })
    }
}
