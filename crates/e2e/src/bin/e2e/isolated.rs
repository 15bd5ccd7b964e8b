//! A host borrows another host's drives through a bridge, and a program there has them by that host's own `vfio-pci`: the drive,
//! of the lender's machine or modelled by the lender's node, reaches what the program has mapped, and nothing else of the host.
//! So does an accelerator, whose program waits for its interrupts.

use std::path::Path;

use rackbus_e2e::Result;
use rackbus_vm::{BareMetalMachine, GuestRelease, VmIommu};

use crate::metal::{
    BorrowerMachine, DRIVE, MetalHosts, begin, explained, join_with, run, start_with,
};
use crate::testbed::COMPUTE;

/// What the lender's node models.
const MODELS: &str = r#"
[hosts.alpha.devices.m0]
kind = "nvme"
size = "64 MiB"
[hosts.alpha.devices.a0]
kind = "accelerator"
functions = 1
"#;

/// What the borrower's scripts have in common. Interrupts of functions behind an NTB are not isolated from each other's, whether the
/// host remaps interrupts or not: VFIO wants to be told that they may be used so.
pub const BINDS: &str = r#"
    device=/sys/bus/pci/devices/ff00:00:00.0
    bind() {
        echo $1 >$device/driver_override
        [ ! -e $device/driver ] || echo ff00:00:00.0 >$device/driver/unbind
        echo ff00:00:00.0 >/sys/bus/pci/drivers_probe
        [ $(basename $(readlink $device/driver)) = ${1:-nvme} ]
    }
    other=/sys/bus/pci/devices/ff01:00:00.0
    busy() {
        rm -f ended.$2
        (mapped $1 until-told >told.$2 2>&1; echo $? >ended.$2) &
        until_ok grep busy told.$2
    }
    was_told() { until_ok test -s ended.$1; cat told.$1; grep told told.$1; }
    borrow() { until_ok rackbus borrow alpha/${1:-d0} --for beta --placement host; until_ok test -b /dev/nvme0n1; }
"#;

/// With Linux 6.12 at both hosts. The borrower has an IOMMU of its own, beside which the module's is; with `iommu=pt`, as a bridge
/// in software passes by it.
pub fn trixie(dir: &Path) -> Result<()> {
    let borrower = BorrowerMachine {
        iommu: VmIommu::Translating,
        append: "iommu=pt",
        ..BorrowerMachine::default()
    };
    let mut hosts = start_with(dir, GuestRelease::Trixie, &DRIVE, &borrower)?;
    let outcome = join_with(&mut hosts, MODELS)
        .and_then(|()| used(&mut hosts))
        .and_then(|()| returned(&mut hosts))
        .and_then(|()| modelled(&mut hosts))
        .and_then(|()| computed(&mut hosts))
        .and_then(|()| lost(&mut hosts))
        .and_then(|()| reopened(&mut hosts));
    explained(&mut hosts, outcome)
}

/// A program writes and reads by VFIO. What it has not mapped, or not any more, the lender's IOMMU refuses, and the lender's
/// node tells.
fn used(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{BINDS}
            borrow
            write
            modprobe -a vfio_iommu_type1 vfio-pci
            [ $(cat $device/iommu_group/type) = identity ]
            [ $(ls $device/iommu_group/devices | wc -l) = 1 ]
            bind vfio-pci
            refused mapped ff00:00:00.0 blocks
            grep 'an IOMMU of type 1.*not permitted' refused
            dmesg | grep 'No interrupt remapping support.*allow_unsafe_interrupts'
            echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
            mapped ff00:00:00.0 blocks
            physical ff00:00:00.0 stray"
        ),
    )?;
    told(lender, "d0", "0x1000000000")?;
    run(borrower, &format!("{BINDS} mapped ff00:00:00.0 ended; healthy"))?;
    told(lender, "d0", "0x400000000")
}

/// What a device of the lender's was refused at this address is an event.
fn told(lender: &mut BareMetalMachine, device: &str, address: &str) -> Result<()> {
    let event =
        format!("rackbus events --kind fault | grep 'alpha/{device}.*{address}[:+].*not mapped'");
    run(lender, &format!("until_ok sh -c \"{event}\"; {event}")).map(drop)
}

/// The host's own driver has the drive again, and all of what it had written; and a program after that, by another life of the
/// lender's node.
fn returned(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{BINDS}
            bind ''
            until_ok test -b /dev/nvme0n1
            verify"
        ),
    )?;
    run(lender, "rackbus restart alpha --program /mnt/files/bin/rackbus")?;
    run(
        borrower,
        &format!(
            "{BINDS}
            verify
            bind vfio-pci
            mapped ff00:00:00.0 blocks
            rackbus return alpha/d0
            [ ! -e $device ]
            borrow
            verify
            healthy"
        ),
    )
    .map(drop)
}

/// A drive that the lender's node models is used in the same way: its program reaches it, and it what the program has mapped. Each
/// mapping is a loan, and no other memory is lent to it; the host's own driver has all of the window again.
fn modelled(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{BINDS}
            rackbus return alpha/d0
            [ ! -e $device ]
            borrow m0
            write
            [ $(cat $device/iommu_group/type) = identity ]
            bind vfio-pci
            mapped ff00:00:00.0 blocks
            physical ff00:00:00.0 stray"
        ),
    )?;
    told(lender, "m0", "0x1000000000")?;
    run(borrower, "mapped ff00:00:00.0 ended")?;
    told(lender, "m0", "0x400000000")?;
    run(borrower, &format!("{BINDS} busy ff00:00:00.0 m0"))?;
    run(
        lender,
        "refused rackbus restart alpha --program /mnt/files/bin/rackbus
        grep vfio-pci refused
        rackbus reach alpha/m0 >reached
        grep -c 'memory lent by beta' reached
        grep 'memory lent by beta' reached | { ! grep -v KiB; }",
    )?;
    // A return has the kernel ask the program for it.
    run(
        borrower,
        &format!(
            "{BINDS}
            rackbus return alpha/m0
            was_told m0
            until_ok test ! -e $device
            borrow m0
            verify
            bind vfio-pci
            mapped ff00:00:00.0 blocks
            bind ''
            until_ok test -b /dev/nvme0n1
            verify"
        ),
    )?;
    run(lender, "rackbus reach alpha/m0 | grep 'memory lent by beta' | { ! grep KiB; }")?;
    run(lender, "rackbus restart alpha --program /mnt/files/bin/rackbus")?;
    run(borrower, &format!("{BINDS} verify; healthy")).map(drop)
}

/// A program has an accelerator that the lender's node models by `vfio-pci`, and its results by interrupts.
fn computed(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{BINDS}
            rackbus return alpha/m0
            until_ok rackbus borrow alpha/a0.vf1 --for beta --placement host
            bind vfio-pci
            accel() {{ rackbus accel run \"$@\"; }}
            {COMPUTE}
            [ $(cat /proc/sys/vm/nr_hugepages) = 0 ]
            rackbus metal list
            set -- $(rackbus metal list | grep alpha/a0.vf1)
            [ $7 -gt 0 ]
            rackbus return alpha/a0.vf1
            [ ! -e $device ]
            borrow
            healthy"
        ),
    )
    .map(drop)
}

/// The lender dies while programs have a drive of its machine and one that its node models: the programs are told, and the drives are
/// gone from the host when they end. Nobody says that what they had mapped is not reached any more, so the NTB is closed.
fn lost(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{BINDS}
            bind vfio-pci
            busy ff00:00:00.0 d0
            until_ok rackbus borrow alpha/m0 --for beta --placement host
            until_ok readlink $other/driver
            echo vfio-pci >$other/driver_override
            echo ff01:00:00.0 >$other/driver/unbind
            echo ff01:00:00.0 >/sys/bus/pci/drivers_probe
            busy ff01:00:00.0 m0"
        ),
    )?;
    run(
        lender,
        "refused rackbus restart alpha --program /mnt/files/bin/rackbus
        grep vfio-pci refused
        for drive in d0 m0; do
            rackbus reach alpha/$drive >reached
            grep -c 'memory lent by beta' reached
            grep 'memory lent by beta' reached | { ! grep -v KiB; }
        done
        pkill -KILL -f 'files/rackbus node'",
    )?;
    run(
        borrower,
        &format!(
            "{BINDS}
            was_told d0
            was_told m0
            until_ok gone
            [ ! -e $device ] && [ ! -e $other ]
            healthy
            dmesg | grep 'closed, as a lender does not say'
            rackbus events | tail -n 4"
        ),
    )
    .map(drop)
}

/// The NTB stays closed until the administrator says that it is to be open again; then the lender lends as before.
fn reopened(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, ntb: [_, far], address: [own, _], .. } = hosts;
    begin(lender, "node.log", &format!("rackbus node --host alpha --join https://{own}:7420"))?;
    run(
        borrower,
        &format!(
            "{BINDS}
            closed() {{ ! rackbus borrow alpha/m0 --for beta --placement host >refused 2>&1 && grep 'rackbus metal reopen' refused; }}
            until_ok closed
            cat refused
            rackbus metal list
            rackbus metal reopen {far}
            borrow m0
            bind vfio-pci
            mapped ff00:00:00.0 blocks
            bind ''
            until_ok test -b /dev/nvme0n1
            refused rackbus metal reopen {far}
            grep 'return them first' refused
            pkill -TERM -f 'files/rackbus node'
            until_ok rmmod rackbus
            healthy"
        ),
    )?;
    // Its IOMMU went with the module, and comes with it.
    borrower.load(&["rackbus"])?;
    run(borrower, &format!("{BINDS} rmmod rackbus; healthy")).map(drop)
}
