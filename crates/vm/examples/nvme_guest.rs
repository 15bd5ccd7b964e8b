//! Boots a prepared guest, plugs in an NVMe drive that this process serves, runs commands, unplugs
//! it: the shortest way from a device model to an unmodified driver, without nodes and leases.
//!
//! `cargo run --release -p rackbus-vm --example nvme_guest -- [bookworm|trixie] [COMMAND]...`

use std::time::{Duration, Instant};

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_pci::Engine;
use rackbus_pci::vfio_user::{EngineDevice, ServedDevice, Server, ShownInterrupts, ShownWith};
use rackbus_vm::{Assets, Boot, GuestRelease, Vm, VmSpec};

const USUAL: [&str; 2] = [
    "nvme id-ctrl /dev/nvme0 | head -n 8",
    "cd /tmp; fio --name=check --filename=/dev/nvme0n1 --rw=randrw --verify=crc32c --direct=1 \
     --bs=4k --size=8M --iodepth=8 --ioengine=libaio --numjobs=1 | grep -E 'err=|IOPS'",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).peekable();
    let guest: Option<GuestRelease> = arguments.peek().and_then(|a| a.parse().ok());
    let mut commands: Vec<String> = arguments.skip(usize::from(guest.is_some())).collect();
    if commands.is_empty() {
        commands = USUAL.map(String::from).to_vec();
    }
    let dir = std::env::temp_dir().join(format!("rackbus-nvme-guest-{}", std::process::id()));
    let socket = dir.with_extension("sock");
    let drive = Nvme::new(&NvmeConfig::memory(64 << 20, "EXAMPLE"))?;
    let engine = Engine::start("example", Box::new(drive), Default::default())?;
    let device = EngineDevice::new(engine.handle().clone())?;
    let server = Server::bind(&socket, move || {
        let shown = ShownInterrupts::choose(device.shape(), false);
        Ok(Box::new(ShownWith::new(device.session(), shown)?) as Box<dyn ServedDevice>)
    })?;

    let start = Instant::now();
    let spec = VmSpec::new("example", &dir, Boot::Guest(guest.unwrap_or_default()));
    let mut vm = Vm::launch(&Assets::of_user(), &spec)?;
    vm.wait_boot(Duration::from_secs(60))?;
    println!("booted in {:?}", start.elapsed());
    let start = Instant::now();
    let id = vm.hot_add("example/nvme0", &socket)?;
    println!("plugged in {:?}", start.elapsed());
    vm.exec("until [ -b /dev/nvme0n1 ]; do sleep 0.01; done", Duration::from_secs(10))?;
    println!("found by the guest after {:?}", start.elapsed());
    for command in &commands {
        let start = Instant::now();
        let output = vm.exec(command, Duration::from_secs(120))?;
        println!("$ {command}\n[{} after {:?}]", output.status, start.elapsed());
        print!("{}", String::from_utf8_lossy(&output.stdout));
        print!("{}", String::from_utf8_lossy(&output.stderr));
    }
    let start = Instant::now();
    assert_eq!(vm.functions()?.first().map(|f| f.socket.as_path()), Some(socket.as_path()));
    vm.hot_remove(&id, rackbus_vm::UNPLUG)?;
    println!("unplugged in {:?}", start.elapsed());
    vm.shutdown()?;
    println!("switched off after {:?}", start.elapsed());
    drop(server);
    Ok(())
}
