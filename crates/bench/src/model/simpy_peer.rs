//! The hold model in SimPy, in a process of its own on the same processor.

use std::process::Command;
use std::time::Duration;

use crate::BenchError;

/// The Python that has SimPy: `scripts/setup bench` makes it.
pub const PYTHON: &str = "simpy-python";
const HOLD: &str = include_str!("hold.py");

/// Holds `pending` events for about `time`; returns events per second.
///
/// # Errors
/// When the script fails.
pub fn hold(pending: u32, time: Duration) -> Result<f64, BenchError> {
    let output = Command::new(PYTHON)
        .args(["-c", HOLD, &pending.to_string(), &time.as_secs_f64().to_string()])
        .output()
        .map_err(BenchError::io(format!("running {PYTHON}")))?;
    String::from_utf8_lossy(&output.stdout).trim().parse().map_err(|_| {
        let complaint = String::from_utf8_lossy(&output.stderr);
        BenchError::Peer(format!("SimPy gave no rate: {complaint}"))
    })
}
