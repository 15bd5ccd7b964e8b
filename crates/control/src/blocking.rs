//! Work that waits for the system, out of the way of the runtime's threads.

use std::panic::resume_unwind;

/// Does what waits for files or takes long on a thread that may, and waits for its result. Where it panics, so does
/// who waits.
pub(crate) async fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(job).await {
        Ok(done) => done,
        Err(failed) => match failed.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // Not begun, since the runtime ends: nobody waits for the result any more.
            Err(_) => std::future::pending().await,
        },
    }
}
