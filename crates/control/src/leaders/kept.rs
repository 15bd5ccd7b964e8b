//! Connections to control planes that were used and are used again: a handshake between machines takes longer than all
//! that is asked on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use rackbus_identity::rustls::ClientConfig;

use super::CONNECT;

/// Connections that are kept at most.
const MOST: usize = 4;
/// How long one to the only control plane is kept that nobody uses: as long as nodes wait between what they say, and more.
const UNUSED: Duration = Duration::from_secs(30);
/// And to one of several. One that stands still is found out about when it is connected to, and the next is asked: a
/// connection that is there says nothing of that.
const UNUSED_OF_SEVERAL: Duration = CONNECT;

/// Asks on a connection.
pub(super) type Asker = SendRequest<Full<Bytes>>;

/// Those that are kept, the least recently used first.
#[derive(Default)]
pub(super) struct KeptConnections(Mutex<Vec<KeptConnection>>);

struct KeptConnection {
    address: String,
    /// Who asks on it: whoever shows something else since makes a new one.
    shown: Arc<ClientConfig>,
    asker: Asker,
    used: Instant,
}

impl KeptConnections {
    fn lock(&self) -> MutexGuard<'_, Vec<KeptConnection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One to `address` on which nothing is under way, for who shows this. There are `all` control planes.
    pub(super) fn take(
        &self,
        address: &str,
        shown: &Arc<ClientConfig>,
        all: usize,
    ) -> Option<Asker> {
        let unused = if all > 1 { UNUSED_OF_SEVERAL } else { UNUSED };
        let mut kept = self.lock();
        kept.retain(|it| !it.asker.is_closed() && it.used.elapsed() < unused);
        let is_it = |it: &KeptConnection| it.address == address && Arc::ptr_eq(&it.shown, shown);
        // While an answer is still being read, it is not ready for the next request.
        let at = kept.iter().position(|it| is_it(it) && it.asker.is_ready())?;
        Some(kept.remove(at).asker)
    }

    /// Keeps one whose answer has begun.
    pub(super) fn keep(&self, address: String, shown: Arc<ClientConfig>, asker: Asker) {
        let mut kept = self.lock();
        if kept.len() >= MOST {
            // What is under way there goes on to its end.
            kept.remove(0);
        }
        kept.push(KeptConnection { address, shown, asker, used: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use hyper_util::rt::TokioIo;
    use rackbus_identity::rustls::RootCertStore;
    use rackbus_identity::rustls::crypto::ring::default_provider;

    use super::*;

    fn config() -> Arc<ClientConfig> {
        let config = ClientConfig::builder_with_provider(default_provider().into());
        let config = config.with_safe_default_protocol_versions().unwrap();
        config.with_root_certificates(RootCertStore::empty()).with_no_client_auth().into()
    }

    /// A connection that is ready, and its other end.
    async fn asker() -> (Asker, tokio::io::DuplexStream) {
        let (here, there) = tokio::io::duplex(64);
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(here));
        let (mut asker, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        asker.ready().await.unwrap();
        (asker, there)
    }

    #[tokio::test]
    async fn a_connection_is_used_again_for_the_same_address_and_the_same_certificate() {
        let (kept, shown) = (KeptConnections::default(), config());
        let (one, _there) = asker().await;
        kept.keep("a:1".to_owned(), shown.clone(), one);
        assert!(kept.take("b:1", &shown, 1).is_none());
        assert!(kept.take("a:1", &config(), 1).is_none(), "a renewed certificate is shown");
        assert!(kept.take("a:1", &shown, 1).is_some());
        assert!(kept.take("a:1", &shown, 1).is_none(), "it is in use");
    }

    #[tokio::test]
    async fn one_of_several_control_planes_is_connected_to_anew_sooner_than_the_only_one() {
        let (kept, shown) = (KeptConnections::default(), config());
        let (one, _there) = asker().await;
        kept.keep("a:1".to_owned(), shown.clone(), one);
        kept.lock()[0].used = Instant::now().checked_sub(UNUSED_OF_SEVERAL).unwrap();
        let one = kept.take("a:1", &shown, 1).unwrap();
        kept.keep("a:1".to_owned(), shown.clone(), one);
        kept.lock()[0].used = Instant::now().checked_sub(UNUSED_OF_SEVERAL).unwrap();
        assert!(kept.take("a:1", &shown, 3).is_none());
        assert!(kept.lock().is_empty(), "it is closed");
    }

    #[tokio::test]
    async fn few_are_kept_and_none_that_the_other_side_has_closed() {
        let (kept, shown) = (KeptConnections::default(), config());
        let mut others = Vec::new();
        for _ in 0..=MOST {
            let (one, there) = asker().await;
            kept.keep("a:1".to_owned(), shown.clone(), one);
            others.push(there);
        }
        assert_eq!(kept.lock().len(), MOST);
        drop(others);
        while kept.lock().iter().any(|it| !it.asker.is_closed()) {
            tokio::task::yield_now().await;
        }
        assert!(kept.take("a:1", &shown, 1).is_none());
    }
}
