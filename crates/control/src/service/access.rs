//! Who may speak for a host, change its devices, or change a lease.

use super::Service;
use super::views::problem;
use crate::access::ApiPeer;
use crate::api::ApiError;
use crate::blocking::blocking;

impl Service {
    /// Lets only the node of `host` speak for it: what a node says ends leases.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host, or `peer` is not its node.
    pub async fn check_node(&self, host: &str, peer: &ApiPeer) -> Result<(), ApiError> {
        self.shared.check_host(host)?;
        let own = |process: i32| u32::try_from(process) == Ok(std::process::id());
        let is_node = match peer {
            ApiPeer::Local(Some(process)) if own(*process) => true,
            ApiPeer::Local(Some(process)) => {
                self.node_of(*process, vec![host.to_owned()]).await.is_some()
            }
            ApiPeer::Local(None)
            | ApiPeer::Person(..)
            | ApiPeer::Control(_)
            | ApiPeer::Revoked(_)
            | ApiPeer::Stranger => false,
            ApiPeer::Node(node, _) => node == host,
        };
        if is_node {
            return Ok(());
        }
        tracing::warn!(host, ?peer, "a process that is not the host's node was refused");
        let error = format!("you are not the node of {host}");
        Err(problem("not_the_node", error, "nodes are started with `rackbus node --host HOST`"))
    }

    /// Lets nobody change the devices of `host` but its own node, and who administrates the rack: what is offered may
    /// name files and programs of that host.
    ///
    /// # Errors
    /// `forbidden`.
    pub async fn check_device_of(&self, host: &str, peer: &ApiPeer) -> Result<(), ApiError> {
        let ApiPeer::Local(Some(process)) = peer else { return peer.acts_for(host) };
        let hosts = self.shared.inventory().hosts.clone();
        match self.node_of(*process, hosts).await {
            Some(own) => ApiPeer::Node(own, None).acts_for(host),
            None => Ok(()),
        }
    }

    /// Which of `hosts` `process` is the node of, if of any. That is seen by their files.
    async fn node_of(&self, process: i32, hosts: Vec<String>) -> Option<String> {
        let is_node = self.is_node.clone();
        blocking(move || hosts.into_iter().find(|host| is_node(host, process))).await
    }

    /// Lets nobody but the borrower of `lease`, and who administrates the rack, change it.
    ///
    /// # Errors
    /// `forbidden`; of what is not known, for others than administrators: it may be made at this moment.
    pub fn check_borrower(&self, lease: u64, peer: &ApiPeer) -> Result<(), ApiError> {
        match (self.lease(lease), peer) {
            (_, ApiPeer::Local(_) | ApiPeer::Control(_)) => Ok(()),
            (Some(known), _) => peer.acts_for(&known.borrower),
            (None, _) => {
                let error = format!("there is no lease {lease}");
                Err(problem("unknown_lease", error, "`rackbus leases --all` lists them"))
            }
        }
    }
}
