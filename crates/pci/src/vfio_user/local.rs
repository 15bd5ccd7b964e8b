//! A function served straight from this process: what tests, benchmarks and single-host users
//! need, without nodes and leases.

use std::path::Path;

use super::device::{EngineDevice, ServedDevice};
use super::socket::Server;
use crate::engine::{Engine, EngineOptions};
use crate::function::Function;

/// A function with its engine and its socket.
#[derive(Debug)]
pub struct LocalFunction {
    // Dropped first: clients go before the engine does.
    server: Server,
    engine: Engine,
}

/// Serves `model` at `path`, to one client after the other; each finds it scrubbed.
///
/// # Errors
/// When the engine or the socket cannot be made.
pub fn serve_function(
    model: Box<dyn Function>,
    path: &Path,
    options: EngineOptions,
) -> std::io::Result<LocalFunction> {
    let engine = Engine::start("engine", model, options)?;
    let device = EngineDevice::new(engine.handle().clone()).map_err(std::io::Error::other)?;
    let server =
        Server::bind(path, move || Ok(Box::new(device.session()) as Box<dyn ServedDevice>))?;
    Ok(LocalFunction { server, engine })
}

impl LocalFunction {
    /// The engine that runs the function.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The server that clients connect to.
    pub fn server(&self) -> &Server {
        &self.server
    }
}
