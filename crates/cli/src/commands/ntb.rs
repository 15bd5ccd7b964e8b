//! `rackbus ntb`: a non-transparent bridge in software, between two virtual machines.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rackbus_devices::ntb::{Bridge, BridgeConfig, BridgeError, BridgeSide, EndConfig};
use rackbus_fabric::rack::format_size;
use serde_json::{Value, json};

use crate::output::{Cell, Failure, Output};
use crate::{log, process};

/// Serve a non-transparent bridge (NTB) in software: two PCI functions, one for each of two virtual machines, which
/// reach each other's memory through them. Linux' ntb_hw_intel drives them.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:
  rackbus ntb --a-socket a.sock --a-memory a.ram --b-socket b.sock --b-memory b.ram --counters ntb.sock
  rackbus ntb show ntb.sock                    what went through, from another terminal
  rackbus ntb ... --window 1M --window2 1M     both windows translated: for Linux' own NTB drivers

Each machine has its memory in its file, and its end behind a port:
  qemu-system-x86_64 -machine q35,memory-backend=ram -m 512M \\
    -object memory-backend-file,id=ram,size=512M,mem-path=a.ram,share=on \\
    -device pcie-root-port,id=p1,chassis=1 \\
    -device '{\"driver\":\"vfio-user-pci\",\"bus\":\"p1\",\"socket\":{\"type\":\"unix\",\"path\":\"a.sock\"}}' ..."
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Action>,
    #[command(flatten)]
    serve: Option<Serve>,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Print what went through a bridge.
    Show {
        /// The socket that the bridge was given with --counters.
        socket: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct Serve {
    /// Where machine A connects.
    #[arg(long, value_name = "SOCKET")]
    a_socket: PathBuf,
    /// The file that is machine A's memory; made when missing.
    #[arg(long, value_name = "FILE")]
    a_memory: PathBuf,
    /// Where machine B connects.
    #[arg(long, value_name = "SOCKET")]
    b_socket: PathBuf,
    /// The file that is machine B's memory; made when missing.
    #[arg(long, value_name = "FILE")]
    b_memory: PathBuf,
    /// Size of the first window, whose accesses are translated: a power of two.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "64M")]
    window: u64,
    /// Size of the second window, translated too; without it that window is the peer's whole memory, mapped.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    window2: Option<u64>,
    /// Size of a memory file that is made.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "512M")]
    memory: u64,
    /// A socket at which `rackbus ntb show` reads the counters.
    #[arg(long, value_name = "SOCKET")]
    counters: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    match crate::size::parse(text)? {
        0 => Err("it is at least 1".to_owned()),
        size => Ok(size),
    }
}

impl From<BridgeError> for Failure {
    fn from(error: BridgeError) -> Self {
        let remedy = match &error {
            BridgeError::Window(_) => {
                return Failure::usage(error.to_string(), "give another size");
            }
            BridgeError::Thread(_) => "free some resources",
            BridgeError::Memory { .. } => "give the size that the machine has, with --memory",
            BridgeError::Io { .. } => "see to the cause, or name another path",
        };
        Failure::new(error.to_string(), remedy)
    }
}

impl Args {
    pub async fn run(&self, output: &Output) -> Result<(), Failure> {
        match (&self.command, &self.serve) {
            (Some(Action::Show { socket }), _) => show(socket, output),
            (None, Some(serve)) => serve.run(output).await,
            (None, None) => Err(Failure::usage("no sockets are named", "see `rackbus ntb --help`")),
        }
    }
}

impl Serve {
    async fn run(&self, output: &Output) -> Result<(), Failure> {
        log::start(None);
        let end = |socket: &Path, memory: &Path| EndConfig {
            socket: socket.to_owned(),
            memory: memory.to_owned(),
        };
        let ends = [end(&self.a_socket, &self.a_memory), end(&self.b_socket, &self.b_memory)];
        let mut config = BridgeConfig::new(ends);
        (config.window, config.second, config.memory_size) =
            (self.window, self.window2, self.memory);
        let mut end = process::EndRequests::listen();
        let bridge = Arc::new(Bridge::start(&config)?);
        if let Some(socket) = &self.counters {
            tell_counters(socket, bridge.clone())?;
        }
        let [first, second] = bridge.windows(BridgeSide::A);
        let ready = json!({
            "ready": true,
            "sockets": [self.a_socket, self.b_socket],
            "windows": { "a": bridge.windows(BridgeSide::A), "b": bridge.windows(BridgeSide::B) },
        });
        output.result(&ready, |o| {
            o.line(&format!(
                "ready: A at {}, B at {}; windows of {} and {}",
                self.a_socket.display(),
                self.b_socket.display(),
                format_size(first),
                format_size(second),
            ));
        });
        end.wait().await;
        for socket in [&self.a_socket, &self.b_socket].into_iter().chain(&self.counters) {
            let _ = std::fs::remove_file(socket);
        }
        Ok(())
    }
}

fn counters(bridge: &Bridge) -> Value {
    json!({
        "link": if bridge.link_is_up() { "up" } else { "down" },
        "a": bridge.counted(BridgeSide::A),
        "b": bridge.counted(BridgeSide::B),
    })
}

/// Tells whoever connects to `socket` the counters, and nothing else.
fn tell_counters(socket: &Path, bridge: Arc<Bridge>) -> Result<(), Failure> {
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{}: {cause}", socket.display()), "name another path")
    };
    let listener = rackbus_memory::socket::listen(socket).map_err(failed)?;
    let tell = move || {
        for mut stream in listener.incoming().flatten() {
            // Who asks may be gone.
            let _ = stream.write_all(counters(&bridge).to_string().as_bytes());
        }
    };
    std::thread::Builder::new().name("counters".into()).spawn(tell).map_err(failed)?;
    Ok(())
}

fn show(socket: &Path, output: &Output) -> Result<(), Failure> {
    let remedy = "name the socket that the bridge was given with --counters";
    let failed =
        |cause: std::io::Error| Failure::new(format!("{}: {cause}", socket.display()), remedy);
    let mut text = String::new();
    UnixStream::connect(socket)
        .and_then(|mut stream| stream.read_to_string(&mut text))
        .map_err(failed)?;
    let value: Value =
        serde_json::from_str(&text).map_err(|cause| Failure::new(cause.to_string(), remedy))?;
    output.result(&value, |o| {
        o.line(&format!("link {}", value["link"].as_str().unwrap_or("unknown")));
        let names = value["a"].as_object().into_iter().flatten().map(|(name, _)| name);
        let rows = names.map(|name| {
            let of = |side: &str| Cell::from(value[side][name].to_string());
            vec![name.as_str().into(), of("a"), of("b")]
        });
        o.table(&["of", "A", "B"], rows.collect());
    });
    Ok(())
}
