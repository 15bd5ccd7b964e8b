//! Other nodes connect to the link: each conversation goes to the service that it is for.

use std::sync::Arc;

use rackbus_fabric::FabricHandle;
use rackbus_link::{IncomingConnection, Listener as LinkListener, Purpose};
use rackbus_memory::{Gate, GatePassage};

use super::NodeOptions;
use crate::lender::LentFunctions;
use crate::metrics::LinkCounters;
use crate::network::NetworkService;
use crate::programs::Programs;
use crate::segments::Segments;
use crate::sequencer::essential_thread;

/// What other nodes come for.
#[derive(Clone)]
pub(super) struct NodeServices {
    pub(super) lender: Arc<LentFunctions>,
    pub(super) segments: Arc<Segments>,
    pub(super) network: NetworkService,
}

impl NodeServices {
    /// What the node of these options serves, with nothing of it started yet.
    pub(super) fn new(
        options: &NodeOptions,
        lender: Arc<LentFunctions>,
        fabric: &FabricHandle,
    ) -> NodeServices {
        let (rack, host, link) = (&options.rack, &options.host, options.link.clone());
        let by = (fabric.clone(), options.lanes.clone());
        let segments = Segments::with_lanes(rack, host, link, options.segments.clone(), by);
        let programs = Programs::new(&options.run_dir, host, &options.segments.hosts);
        segments.borrow_by(Arc::new(programs));
        NodeServices { lender, segments, network: options.network.clone() }
    }

    /// Serves who has connected, until the conversation ends; what can continue in another process rests as `passage`
    /// says.
    fn serve(self, incoming: IncomingConnection, passage: GatePassage) {
        match incoming.hello.service {
            Purpose::Segments => {
                // What it comes to is counted by the service, and is never passed on.
                drop(passage);
                self.segments.attend(incoming);
            }
            Purpose::Network => {
                // Its rings are opened anew by whoever continues.
                drop(passage);
                self.network.attend(incoming);
            }
            Purpose::Function { .. }
            | Purpose::Medium { .. }
            | Purpose::Resume { .. }
            | Purpose::Window { .. } => self.lender.attend(incoming, &passage),
        }
    }
}

/// A thread that hears who connects to the link; each conversation gets its own.
pub(super) fn attend(
    listener: Box<dyn LinkListener>,
    served: NodeServices,
    counters: Arc<LinkCounters>,
    gate: Gate,
) -> std::io::Result<()> {
    let accept = move || {
        loop {
            let passage = gate.enter_when_readable(listener.arrival());
            // Who waited here would keep the node from being restarted.
            let caller = match listener.accept_arrived() {
                Ok(Some(caller)) => caller,
                Ok(None) => continue,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                    counters.refuse();
                    continue;
                }
                Err(error) => {
                    tracing::error!(%error, "the link cannot accept connections");
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                }
            };
            let (served, counters) = (served.clone(), counters.clone());
            // One that says nothing must not keep the node from being restarted. Who is cut off connects again.
            let passage = (!caller.is_slow()).then_some(passage);
            let gate = gate.clone();
            let talk = move || {
                let Some(incoming) = caller.hear() else { return counters.refuse() };
                let passage = passage.unwrap_or_else(|| gate.enter());
                match counters.begin(&incoming.hello.service, &incoming.hello.from) {
                    Some(_open) => served.serve(incoming, passage),
                    // Who was told so would give its session up; who is cut off tries again.
                    None if matches!(incoming.hello.service, Purpose::Resume { .. }) => {}
                    None => incoming
                        .refuse("your host has as many conversations of this kind as it may"),
                }
            };
            if let Err(error) = std::thread::Builder::new().name("link peer".into()).spawn(talk) {
                tracing::error!(%error, "a connection to the link was dropped: cannot start a thread for it");
            }
        }
    };
    essential_thread("link", accept)
}
