# What people do with rackbus' source. Everything is built in target/ and kept, with what set-up
# downloads, in ~/.cache/rackbus (or RACKBUS_CACHE).

SHELL := /bin/sh
CARGO ?= cargo
PREFIX ?= /usr/local
BUILT := $(or $(CARGO_TARGET_DIR),target)/release
CACHE := $(or $(RACKBUS_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rackbus)
# Areas that `make bench` measures: AREA=nvme make bench runs one.
SOAK_SECONDS ?= 600
AREA ?= nvme lending model datapath memory guests accel machines net metal

.PHONY: help build install package setup kernel demo demo-machines demo-metal demo-sisci test test-cargo test-kernel test-loom test-e2e test-e2e-more test-kernel-debug test-upgrade soak sim fuzz bench check clean

help:
	@echo "make demo    three hosts, a drive lent to two stock Linux VMs in turn; under a minute when set up"
	@echo "make demo-machines  the same over a network: machines in namespaces, a cable that is pulled (needs root)"
	@echo "make demo-sisci  a program in two guests of two hosts, which share memory with each other and with hosts"
	@echo "make demo-metal  a host's own driver drives another host's drive: three machines, NTBs in software (needs root)"
	@echo "make build   the rackbus binary, libsisci.so and librackbus_accel.so, in target/release"
	@echo "make install PREFIX=/usr/local: the binary, libsisci.so with headers and tools for SISCI programs,"
	@echo "             and librackbus_accel with its header for programs that drive accelerators"
	@echo "make package a Debian package, with systemd units for the control plane and nodes, in target/package"
	@echo "make setup   QEMU with vfio-user and Debian guests into $(CACHE), without root"
	@echo "make kernel  the kernel module for borrowing through an NTB, for the guests; for this host: make -C kernel"
	@echo "make test    everything: unit and property tests, conformance, real processes, stock guests"
	@echo "make test-e2e-more  what the end-to-end tests leave out for time: the same on another version of Linux, or longer"
	@echo "make test-kernel-debug  borrowing through an NTB under a Linux with lockdep and KASAN, which is built once (needs root)"
	@echo "make test-upgrade  a rack of machines that is upgraded one at a time, from PREVIOUS=COMMIT (built once)"
	@echo "make sim     the seeded simulations, a million seeds each (RACKBUS_SEEDS=N for another number), fewer of long ones"
	@echo "make soak    a rack under load whose processes die and stand still, and then machines whose network fails as well"
	@echo "             (as root); SOAK_SECONDS=600 each"
	@echo "make fuzz    coverage-guided fuzzing of every parser, FUZZ_SECONDS=30 each"
	@echo "make bench   measurements (AREA=nvme: one area); rows in target/bench/results.jsonl"
	@echo "make check   names, handles, formatting, lints, documentation: what .ci/run does before make test"
	@echo "What fails ends make with 2, as GNU make does whatever its recipe ended with; the scripts"
	@echo "that sim and fuzz run, scripts/sim and scripts/fuzz, end with 1."

build:
	$(CARGO) build --release -p rackbus-cli -p rackbus-sisci -p rackbus-accel-c

# Built together: one after the other they want their dependencies with other features, and compile them twice.
install: build
	install -D -m 755 $(BUILT)/rackbus $(DESTDIR)$(PREFIX)/bin/rackbus
	DESTDIR=$(DESTDIR) SISCI_LIB=$(BUILT) scripts/install-sisci $(PREFIX)
	DESTDIR=$(DESTDIR) ACCEL_LIB=$(BUILT) scripts/install-accel $(PREFIX)

# rackbus_VERSION_ARCHITECTURE.deb in target/package.
package: build
	scripts/package $(BUILT) target/package

setup:
	@scripts/setup

kernel:
	@scripts/setup kernel

demo: setup
	$(CARGO) build --release -p rackbus-cli -p rackbus-e2e
	target/release/demo examples/demo/rack.toml target/demo

demo-machines: setup
	$(CARGO) build --release -p rackbus-cli -p rackbus-e2e
	target/release/demo-machines examples/machines/rack.toml

demo-sisci: setup
	$(CARGO) build --release -p rackbus-cli -p rackbus-e2e -p rackbus-sisci
	target/release/demo-sisci examples/sisci/guests.toml examples/sisci/hello.c target/demo-sisci

# It needs the kernel module for both guests.
demo-metal: setup kernel
	$(CARGO) build --release -p rackbus-cli -p rackbus-e2e
	target/release/demo-metal target/demo-metal

test: test-cargo test-kernel test-loom test-e2e

# A rack of machines that is upgraded one at a time from the version before, which is built into the cache.
PREVIOUS ?= 2f3f1bb018b0d8bddf20f8079d76b4c78f89e00c
test-upgrade:
	RACKBUS_PREVIOUS=$$(scripts/previous $(PREVIOUS)) $(CARGO) test -p rackbus-cli --test upgrade

# With a browser named, the tests of reports fail without it instead of checking the page's text only; with the
# example server named, a test lends it. The cases of property tests are the same in each run, so that a run fails for
# what was changed; `make sim` tries others. All tests run, also behind one that fails.
test-cargo: export PROPTEST_RNG_SEED ?= 1
test-cargo:
	@scripts/setup browser gpio etcd libfabric programs
	RACKBUS_BROWSER=$(CACHE)/browser/run/chromium RACKBUS_GPIO=$(CACHE)/gpio/bin/gpio RACKBUS_ETCD=$(CACHE)/etcd/run/etcd \
		RACKBUS_LIBFABRIC=$(CACHE)/libfabric/run/libfabric.so.1 LD_LIBRARY_PATH=$(CACHE)/libfabric/run \
		$(CARGO) test --workspace --no-fail-fast

# What the kernel module makes of what a lender says, in user space; then what the kernel's own tools say of its source, and
# whether DKMS builds it.
test-kernel:
	@$(MAKE) -s -C kernel check
	@scripts/setup kernel
	@scripts/kernel --lint bookworm
	@scripts/kernel --lint trixie
	@scripts/kernel --dkms bookworm
	@scripts/kernel --dkms trixie

# The algorithms in shared memory under every order of accesses; built apart, with other flags. Then the order in which
# copies store, which only a release build shows: its compiler moves stores.
test-loom:
	RUSTFLAGS="--cfg loom" $(CARGO) test -p rackbus-memory --test loom --release --target-dir target/loom
	$(CARGO) test -p rackbus-memory --test store_order --release

# By the profile of the other tests, of which most is built by then: guests under TCG take most of the time, and a
# release build would take longer than it saves. Arithmetic that overflows ends a process here.
# With the targets of tests, so that dependencies have the features that test-cargo has built them with.
test-e2e: setup
	@scripts/setup kernel trixie-backports system programs etcd
	$(CARGO) build --workspace --all-targets
	target/debug/demo examples/demo/rack.toml target/demo
	target/debug/demo-sisci examples/sisci/guests.toml examples/sisci/hello.c target/demo-sisci
	PATH="$(CACHE)/ssh/run:$$PATH" target/debug/e2e target/e2e
	target/debug/soak target/soak 45
	@if [ "$$(id -u)" = 0 ]; then target/debug/demo-machines examples/machines/rack.toml && \
		target/debug/soak-machines target/soak-machines 45; \
		else echo "demo-machines and soak-machines: left out, they need root"; fi

# Scenarios that `make test` leaves out, since it has others that are the same on another version of Linux or shorter.
test-e2e-more: setup
	@scripts/setup kernel trixie-backports
	@scripts/kernel trixie-backports
	@scripts/kernel --lint trixie-backports
	$(CARGO) build --workspace --all-targets
	target/debug/e2e target/e2e-more --more

# What the kernel module does under a Linux that looks at locks and memory.
test-kernel-debug: setup
	$(CARGO) build -p rackbus-cli -p rackbus-e2e --bins
	cache=$$(scripts/debug-kernel) && RACKBUS_CACHE=$$cache target/debug/e2e target/e2e-debug "Linux 6.12's own driver" \
		"a program drives a drive of another host by its own" "Linux 6.12 returns no way"

# A rack under load whose processes die and stand still, and one of machines whose network fails as well: SOAK_SECONDS of
# each, a minute of each in `make test`.
soak:
	$(CARGO) build --release -p rackbus-cli -p rackbus-e2e
	target/release/soak target/soak $(SOAK_SECONDS)
	@if [ "$$(id -u)" = 0 ]; then target/release/soak-machines target/soak-machines $(SOAK_SECONDS); \
		else echo "soak-machines: left out, it needs root"; fi

sim:
	@CARGO="$(CARGO)" scripts/sim

fuzz:
	@CARGO="$(CARGO)" scripts/fuzz

bench:
	@scripts/setup bench kernel
	$(CARGO) build --release -p rackbus-cli -p rackbus-sisci
	$(CARGO) build --release -p rackbus-bench --features peers,guests
	@for area in $(AREA); do \
		PATH="$(CACHE)/bench/run:$(CACHE)/ucx/run:$(CACHE)/simpy/run:$(CACHE)/dpdk/run:$$PATH" target/release/rackbus-bench $$area $(BENCH_ARGS) || exit 1; \
	done

check:
	@scripts/names
	@scripts/seam
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	$(CARGO) clippy --workspace --all-targets --features rackbus-bench/peers,rackbus-bench/guests -- -D warnings
	RUSTFLAGS="--cfg loom" $(CARGO) clippy -p rackbus-memory --test loom --target-dir target/loom -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

clean:
	$(CARGO) clean
