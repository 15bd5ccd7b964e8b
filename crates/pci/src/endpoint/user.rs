//! Who uses a function: from when on, over which conversation, and what is logged of it.

use std::sync::Arc;

use rackbus_fabric::Lending;
use rackbus_memory::Stream;
use tracing::Span;

use super::Endpoint;

impl Endpoint {
    /// A user begins, who lends its memory by `lending`. With a conversation, the function is its as
    /// long as that is open.
    pub fn begin(&mut self, lending: Lending, conversation: Option<Arc<dyn Stream>>) {
        self.lending = lending;
        self.user.is_of(conversation);
        self.dma.begin();
    }

    /// What is logged until the user is gone is about `about`: the user's lease.
    pub fn log_about(&mut self, about: Span) {
        self.about = about;
    }

    /// What is logged now is about this; nothing where no user has said so.
    pub(crate) fn about(&self) -> &Span {
        &self.about
    }

    /// Time has passed in which this thread did not run. Where the user has given the function up
    /// meanwhile, what was its memory may be somebody else's: nothing of it is touched any more.
    pub fn check_user(&self) {
        self.user.check();
    }
}
