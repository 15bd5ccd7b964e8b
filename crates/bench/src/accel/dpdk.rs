//! DPDK's own measurement of its crypto drivers that run on processors (`dpdk-test-crypto-perf`).

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::BenchError;

/// A driver of DPDK's.
#[derive(Debug, Clone, Copy)]
pub struct DpdkDriver {
    /// What DPDK calls it.
    pub name: &'static str,
    /// The file that it is in.
    plugin: &'static str,
}

/// What Debian's package has that runs on any processor.
pub const DRIVERS: [DpdkDriver; 2] = [
    DpdkDriver { name: "crypto_openssl", plugin: "librte_crypto_openssl.so.23" },
    DpdkDriver { name: "crypto_aesni_gcm", plugin: "librte_crypto_ipsec_mb.so.23" },
];

/// What `scripts/setup bench` makes of the package: the program with its drivers, by name.
const PROGRAM: &str = "dpdk-test-crypto-perf";
/// Operations that it does at least.
const LEAST: u64 = 20_000;

impl DpdkDriver {
    /// Whether it runs here.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), String> {
        match self.operations(1024, LEAST) {
            Ok(rate) if rate > 0.0 => Ok(()),
            Ok(_) => Err(format!("{PROGRAM} says nothing of {}", self.name)),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Operations each second on messages of so many bytes: 256-bit AES-GCM, 32 at a time.
    ///
    /// # Errors
    /// When the program fails.
    pub fn rate(&self, bytes: usize, time: Duration) -> Result<f64, BenchError> {
        // It counts operations: as many as take about the time.
        let short = self.operations(bytes, LEAST)?;
        self.operations(bytes, (short * time.as_secs_f64()) as u64)
    }

    fn operations(&self, bytes: usize, count: u64) -> Result<f64, BenchError> {
        let own = ["--no-huge", "-m", "256", "--no-pci", "--no-telemetry", "-l", "0,1"];
        let test = [
            "--ptest",
            "throughput",
            "--optype",
            "aead",
            "--aead-algo",
            "aes-gcm",
            "--aead-op",
            "encrypt",
            "--aead-key-sz",
            "32",
            "--aead-iv-sz",
            "12",
            "--aead-aad-sz",
            "16",
            "--digest-sz",
            "16",
            "--burst-sz",
            "32",
            "--silent",
            "--csv-friendly",
        ];
        let output = Command::new(PROGRAM)
            .args(own)
            .args(["-d", self.plugin, "--vdev", &format!("{}0", self.name), "--"])
            .args(test)
            .args(["--devtype", self.name])
            .args(["--buffer-sz", &bytes.to_string()])
            .args(["--total-ops", &count.max(LEAST).to_string()])
            .stdin(Stdio::null())
            .output()
            .map_err(BenchError::io(format!("starting {PROGRAM}")))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // lcore, bytes, burst, enqueued, dequeued, failed, failed, millions of operations each second, Gbit/s, cycles
        let rate = text.lines().rev().find_map(|line| {
            let fields: Vec<&str> = line.split(',').collect();
            (fields.len() == 10).then(|| fields[7].trim().parse::<f64>().ok()).flatten()
        });
        match rate {
            Some(millions) => Ok(millions * 1e6),
            None => {
                let last = String::from_utf8_lossy(&output.stderr);
                let last = last.lines().last().unwrap_or("it said nothing").to_owned();
                Err(BenchError::Peer(format!("{PROGRAM}: {}: {last}", output.status)))
            }
        }
    }
}
