//! A stock kernel seals what goes between two machines' nodes (kTLS): both nodes run in one guest, since the kernel of the
//! machine that tests may not be able to.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Guest, Result, ensure, programs};

use crate::RackWithGuests;

/// How long the script may take, which waits for many things.
const SCRIPT: Duration = Duration::from_secs(300);

/// Two nodes join a control plane; what one lends the other uses by TCP. Then the lender's node is restarted in place, so
/// that a session is resumed by another connection while it is used.
const RACK: &str = r#"
    set -eu
    cd /tmp
    export LD_LIBRARY_PATH=/tmp/programs PATH=/tmp/programs:$PATH
    until_ok() { n=0; until "$@" >said 2>&1; do n=$((n + 1)); [ $n -lt 600 ] || { cat said; return 1; }; sleep 0.05; done; }
    sealed() { sed -n "s/^$1[[:space:]]*//p" /proc/net/tls_stat; }
    trap '[ $? = 0 ] || { set +e; cat busy; tail -n 8 *.log; cat /proc/net/tls_stat; }' EXIT
    ip link set lo up
    # By which the kernel loads what it needs, as on any Debian.
    command -v modprobe >/proc/sys/kernel/modprobe
    printf 'name = "sealed"
        [hosts.alpha.devices.d0]
        kind = "nvme"
        size = "16 MiB"
        backing = "memory"
        [hosts.beta]
        ' >rack.toml
    control="rackbus --run-dir /tmp/control"
    XDG_STATE_HOME=/tmp/state $control control rack.toml --listen 127.0.0.1:7420 >control.log 2>&1 &
    until_ok $control status
    join() {
        (umask 077; $control token $1 >$1.token)
        rackbus node --host $1 --join https://127.0.0.1:7420 --token-file $1.token --listen 127.0.0.1:$2 \
            --run-dir /tmp/$1 --state-dir /tmp/$1.state >$1.log 2>&1 &
    }
    join alpha 7421
    join beta 7422
    until_ok rackbus --run-dir /tmp/beta borrow alpha/d0 --for beta --json
    socket=$(sed -n 's/.*"socket": *"\([^"]*\)".*/\1/p' said | head -n 1)
    physical $socket write
    # Each node has tried it with a connection to itself, and both ends of the one between them are sealed.
    [ $(sealed TlsTxSw) -ge 4 ]
    [ $(sealed TlsRxSw) -ge 4 ]
    rm -f busy; physical $socket busy >busy 2>&1 &
    user=$!
    until_ok grep busy busy
    before=$(sealed TlsTxSw)
    until_ok rackbus --run-dir /tmp/alpha restart alpha
    # alpha's new process tries it, too.
    resumed() { [ $(sealed TlsTxSw) -ge $((before + 3)) ]; }
    until_ok resumed
    kill -0 $user
    kill -9 $user
    physical $socket write
    physical $socket verify
    [ $(sealed TlsDecryptError) = 0 ]
    $control return alpha/d0
    cat /proc/net/tls_stat
"#;

/// The drive's operations go by connections that the kernel seals, also when a session is resumed.
pub fn by_the_kernel(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let disk = programs::qemu_arguments(&programs::disk(rack, &["rackbus", "physical"])?);
    let mut more = vec!["--memory", "1G", "--"];
    more.extend(disk.iter().map(String::as_str));
    let mut guest = Guest::start_with(rack, "sealed", "gamma", "bookworm", &[], &more)?;
    guest.booted()?;
    guest.run(&programs::unpack("/dev/vdb"))?;
    let outcome = guest.begin(RACK, SCRIPT)?.wait()?;
    let said = succeeded(guest.name(), "nodes whose connections the kernel seals", &outcome)?;
    ensure!(said.contains("TlsTxSw"), "the kernel does not say what it sealed: {said}");
    guest.stop(rack)
}
