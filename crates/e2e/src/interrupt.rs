//! What an interrupted test undoes: what it has started outlives it otherwise. A process has one handler of signals, and a
//! test may have racks and testbeds one after the other.

use std::sync::{Mutex, Once, PoisonError};

type Cleanup = Box<dyn Fn() + Send>;

static CLEANUPS: Mutex<Vec<Cleanup>> = Mutex::new(Vec::new());
static HANDLER: Once = Once::new();

/// Has this done before an interrupt ends the process, beside what was asked for before.
pub(crate) fn when_interrupted(cleanup: impl Fn() + Send + 'static) {
    let all = || CLEANUPS.lock().unwrap_or_else(PoisonError::into_inner);
    all().push(Box::new(cleanup));
    HANDLER.call_once(|| {
        // Without a handler an interrupt leaves things behind, and the test goes on as well.
        let _ = ctrlc::set_handler(move || {
            all().iter().rev().for_each(|cleanup| cleanup());
            std::process::exit(130);
        });
    });
}
