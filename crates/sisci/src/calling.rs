//! Calls of a program's function, on a thread of the library, for something that the program ends:
//! when the call that ends it returns, nobody is called any more.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// Who is in a callback, and when it has returned. One call is made at a time.
#[derive(Debug, Default)]
pub(crate) struct Calling {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    by: Option<ThreadId>,
    /// Nobody is called any more.
    over: bool,
}

impl Calling {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a call answers; `None` where none is wanted any more.
    pub(crate) fn during<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        {
            let by_others = |state: &mut State| state.by.is_some() && !state.over;
            let waited = self.returned.wait_while(self.lock(), by_others);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.over {
                return None;
            }
            state.by = Some(std::thread::current().id());
        }
        let answer = call();
        self.lock().by = None;
        self.returned.notify_all();
        Some(answer)
    }

    /// Nobody is called any more when this returns, unless it is that call that ends it.
    pub(crate) fn end(&self) {
        let own = std::thread::current().id();
        let mut state = self.lock();
        state.over = true;
        self.returned.notify_all();
        let by_others = |state: &mut State| state.by.is_some_and(|by| by != own);
        // The result is that nobody else is in it; there is nothing to look at.
        drop(self.returned.wait_while(state, by_others));
    }
}
