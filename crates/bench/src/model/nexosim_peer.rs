//! The hold model in nexosim, on one thread. All events are of one model, which is its fastest
//! form: with a model for each event it holds 65536 at a fifth of the rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nexosim::model::{BuildContext, Context, Model, ProtoModel, schedulable};
use nexosim::simulation::{Mailbox, SimInit};
use nexosim::time::MonotonicTime;
use serde::{Deserialize, Serialize};

use super::events::{DelaySequence, Spread, rate};
use crate::BenchError;

/// Simulated time between two looks at the clock, times the pending events: about 10 000 events.
const SPAN: Duration = Duration::from_secs(5);

/// A server that holds each packet for a time and passes it on.
#[derive(Serialize, Deserialize)]
struct Holder {
    pending: u32,
}

/// What it has beside its state. nexosim's finest tick is a nanosecond where ours is a picosecond:
/// it gets as many ticks.
struct HolderEnv {
    delays: DelaySequence,
    done: Arc<AtomicU64>,
}

impl HolderEnv {
    fn delay(&mut self) -> Duration {
        Duration::from_nanos(self.delays.ticks())
    }
}

#[Model(type Env = HolderEnv)]
impl Holder {
    #[nexosim(init)]
    async fn init(&mut self, cx: &Context<Self>, env: &mut HolderEnv) {
        for _ in 0..self.pending {
            Holder::schedule(cx, env);
        }
    }

    #[nexosim(schedulable)]
    async fn happen(&mut self, _: (), cx: &Context<Self>, env: &mut HolderEnv) {
        env.done.fetch_add(1, Ordering::Relaxed);
        Holder::schedule(cx, env);
    }

    fn schedule(cx: &Context<Self>, env: &mut HolderEnv) {
        let scheduled = cx.schedule_event(env.delay(), schedulable!(Self::happen), ());
        scheduled.expect("every delay is longer than none");
    }
}

/// What NeXosim builds a [`Holder`] of.
struct NewHolder {
    pending: u32,
    done: Arc<AtomicU64>,
}

impl ProtoModel for NewHolder {
    type Model = Holder;

    fn build(self, _: &mut BuildContext<Self>) -> (Holder, HolderEnv) {
        let env = HolderEnv { delays: DelaySequence::new(Spread::Even), done: self.done };
        (Holder { pending: self.pending }, env)
    }
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(format!("nexosim: {error}"))
}

/// Holds `pending` events for about `time`; returns events per second.
///
/// # Errors
/// When the simulation fails.
pub fn hold(pending: u32, time: Duration) -> Result<f64, BenchError> {
    let done = Arc::new(AtomicU64::new(0));
    let holder = NewHolder { pending, done: Arc::clone(&done) };
    let mut simulation = SimInit::with_num_threads(1)
        .add_model(holder, Mailbox::new(), "holder")
        .init(MonotonicTime::EPOCH)
        .map_err(failed)?;
    rate(time, || {
        let before = done.load(Ordering::Relaxed);
        simulation.step_until(SPAN / pending).map_err(failed)?;
        Ok(done.load(Ordering::Relaxed) - before)
    })
}
