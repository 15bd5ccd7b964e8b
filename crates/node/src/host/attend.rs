//! Other nodes connect to the link: each conversation goes to the service that it is for.

use std::sync::Arc;

use rackbus_link::{Listener as LinkListener, Service};
use rackbus_memory::Gate;

use crate::lender::LentFunctions;
use crate::metrics::LinkCounters;
use crate::network::NetworkService;
use crate::segments::Segments;

/// What other nodes come for.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) lender: Arc<LentFunctions>,
    pub(super) segments: Arc<Segments>,
    pub(super) network: NetworkService,
}

/// A thread that hears who connects to the link; each conversation gets its own.
pub(super) fn attend(
    listener: Box<dyn LinkListener>,
    served: Served,
    counters: Arc<LinkCounters>,
    gate: Gate,
) -> std::io::Result<()> {
    let accept = move || {
        loop {
            let passage = listener.socket().map(|socket| gate.enter_when_readable(socket));
            let caller = match listener.accept() {
                Ok(caller) => caller,
                Err(error) => {
                    tracing::error!(%error, "the link cannot accept");
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                }
            };
            let Served { lender, segments, network } = served.clone();
            let counters = counters.clone();
            let passage = passage.unwrap_or_else(|| gate.enter());
            let talk = move || {
                let Some(incoming) = caller.hear() else { return counters.refuse() };
                let _open = counters.begin(&incoming.hello.service);
                match incoming.hello.service {
                    Service::Segments => {
                        // What it comes to is counted by the service, and is never passed on.
                        drop(passage);
                        segments.attend(incoming);
                    }
                    Service::Network => {
                        // Its rings are opened anew by whoever goes on.
                        drop(passage);
                        network.attend(incoming);
                    }
                    Service::Function { .. }
                    | Service::Medium { .. }
                    | Service::Resume { .. }
                    | Service::Window { .. } => {
                        lender.attend(incoming, &passage);
                    }
                }
            };
            if let Err(error) = std::thread::Builder::new().name("link peer".into()).spawn(talk) {
                tracing::error!(%error, "a connection to the link was dropped: no thread for it");
            }
        }
    };
    std::thread::Builder::new().name("link".into()).spawn(accept).map(drop)
}
