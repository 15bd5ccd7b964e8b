//! Interrupts as the host receives them: MSI-X by eventfd, and the pin.

use rackbus_memory::Event;
use rackbus_pci::Work;
use rackbus_pci::endpoint::IrqChange;

use super::*;

/// Writes a capability's message control in configuration space.
fn control(host: &mut TestHost, capability: u8, value: u16) {
    let mut at = 0x34;
    let mut found = [0; 2];
    host.endpoint.read(FunctionRegion::Config, at, &mut found[..1]).unwrap();
    found[1] = found[0];
    while found[0] != capability || at == 0x34 {
        assert_ne!(found[1], 0, "no capability {capability:#x}");
        at = u64::from(found[1]);
        host.endpoint.read(FunctionRegion::Config, at, &mut found).unwrap();
    }
    host.endpoint.write(FunctionRegion::Config, at + 2, &value.to_le_bytes()).unwrap();
}

fn enable_msix(host: &mut TestHost) {
    control(host, 0x11, 0x8000);
}

/// Enables MSI with two to the power of `vectors` vectors.
fn enable_msi(host: &mut TestHost, vectors: u16) {
    control(host, 0x05, vectors << 4 | 1);
}

fn wire(host: &mut TestHost, vector: u32) -> Event {
    let event = Event::new().unwrap();
    let fd = event.as_fd().try_clone_to_owned().unwrap();
    host.endpoint.set_irqs(IrqChange::WireVectors(vector, vec![Some(fd)])).unwrap();
    event
}

#[test]
fn a_batch_of_completions_is_one_interrupt() {
    let mut host = TestHost::with_memory(1 << 20);
    enable_msix(&mut host);
    let (admin_event, event) = (wire(&mut host, 0), wire(&mut host, 1));
    let buffer = host.scratch();
    for lba in 0..4 {
        host.submit(1, transfer(IoOpcode::Read, lba, 512, buffer));
    }
    assert!(!event.drain());
    assert_eq!(host.poll(), Work::Done);
    assert!(event.drain() && !admin_event.drain());
    host.submit(0, admin(AdminOpcode::Abort));
    host.poll();
    assert!(!event.drain() && admin_event.drain());
}

#[test]
fn coalescing_waits_for_number_or_time() {
    let mut host = TestHost::with_memory(1 << 20);
    enable_msix(&mut host);
    let event = wire(&mut host, 1);
    let mut set = admin(AdminOpcode::SetFeatures);
    // Three completions, or 200 µs.
    (set.cdw10, set.cdw11) = (8, 2 << 8 | 2);
    assert_eq!(host.status(0, set), Status::SUCCESS);
    let buffer = host.scratch();
    let read = transfer(IoOpcode::Read, 0, 512, buffer);
    for expected in [false, false, true] {
        host.submit(1, read);
        host.poll();
        assert_eq!(event.drain(), expected);
    }
    host.submit(1, read);
    host.poll();
    let Work::Asleep(Some(deadline)) = host.poll() else { panic!("the interrupt is forgotten") };
    assert!(host.endpoint.park() && !event.drain(), "not before its time");
    host.now = deadline;
    host.poll();
    assert!(event.drain());
    // Exempt from coalescing.
    (set.cdw10, set.cdw11) = (9, 1 << 16 | 1);
    assert_eq!(host.status(0, set), Status::SUCCESS);
    host.submit(1, read);
    host.poll();
    assert!(event.drain());
}

#[test]
fn the_pin_is_high_while_completions_wait() {
    let mut host = TestHost::with_memory(1 << 20);
    // Creating the queues left no completion unread.
    let event = Event::new().unwrap();
    let fd = event.as_fd().try_clone_to_owned().unwrap();
    host.endpoint.set_irqs(IrqChange::WireIntx(Some(fd))).unwrap();
    let buffer = host.scratch();
    let pin = |host: &mut TestHost| {
        let mut status = [0; 2];
        host.endpoint.read(FunctionRegion::Config, 6, &mut status).unwrap();
        status[0] & 8 != 0
    };
    assert!(!pin(&mut host));
    host.submit(1, transfer(IoOpcode::Read, 0, 512, buffer));
    host.poll();
    assert!(pin(&mut host) && event.drain());
    // Masked by the controller's own register, and unmasked.
    host.write4(reg::INTMS, 1 << 1);
    assert!(!pin(&mut host));
    host.write4(reg::INTMC, 1 << 1);
    assert!(pin(&mut host));
    // Software that fires the interrupt does not change what the pin is.
    host.endpoint.set_irqs(IrqChange::FireIntx).unwrap();
    assert!(pin(&mut host));
    // Reading the completion moves the head doorbell.
    assert!(host.completion(1).is_some());
    assert!(!pin(&mut host));
}

/// As a driver does that masks in its handler, looks at its completions in a thread, and unmasks:
/// what completes meanwhile may not be lost.
#[test]
fn a_masked_message_is_sent_when_the_mask_goes() {
    for shadow in [false, true] {
        let mut host = TestHost::with_memory(1 << 20);
        enable_msi(&mut host, 5);
        if shadow {
            host.configure_shadow();
        }
        let (other, event) = (wire(&mut host, 0), wire(&mut host, 1));
        // Of the admin queue, while its vector was not wired.
        other.drain();
        let read = transfer(IoOpcode::Read, 0, 512, host.scratch());
        let complete = |host: &mut TestHost| {
            host.enqueue(1, read);
            host.ring(1);
            host.poll();
        };
        let consume = |host: &mut TestHost| {
            assert!(host.take_completion(1).is_some());
            host.give_back(1);
        };
        complete(&mut host);
        assert!(event.drain());
        host.write4(reg::INTMS, 1 << 1);
        consume(&mut host);
        // After the last look.
        complete(&mut host);
        assert!(!event.drain(), "masked");
        host.write4(reg::INTMC, 1 << 1);
        assert!(event.drain(), "completions wait");
        // Nothing waits: nothing is told.
        host.write4(reg::INTMS, 1 << 1);
        consume(&mut host);
        host.write4(reg::INTMC, 1 << 1);
        host.poll();
        assert!(!event.drain());
        // To clear what is clear already says nothing of completions that were told of.
        complete(&mut host);
        assert!(event.drain());
        host.write4(reg::INTMC, 1 << 1);
        assert!(!event.drain() && !other.drain());
    }
}

#[test]
fn with_msix_the_mask_register_has_no_effect() {
    let mut host = TestHost::with_memory(1 << 20);
    enable_msix(&mut host);
    let event = wire(&mut host, 1);
    host.write4(reg::INTMS, !0);
    let read = transfer(IoOpcode::Read, 0, 512, host.scratch());
    host.submit(1, read);
    host.poll();
    assert!(event.drain());
    host.write4(reg::INTMC, !0);
    assert!(!event.drain());
}

#[test]
fn vectors_that_the_driver_did_not_enable_send_nothing() {
    let mut host = TestHost::with_memory(1 << 20);
    enable_msi(&mut host, 0);
    let (admin_event, event) = (wire(&mut host, 0), wire(&mut host, 1));
    let read = transfer(IoOpcode::Read, 0, 512, host.scratch());
    host.submit(1, read);
    host.submit(0, admin(AdminOpcode::Abort));
    host.poll();
    assert!(admin_event.drain() && !event.drain());
}

/// Drivers count their vectors with one kind of interrupts and continue with more or another.
#[test]
fn what_waits_is_told_again_by_another_kind_of_interrupts() {
    let mut host = TestHost::with_memory(1 << 20);
    let event = wire(&mut host, 1);
    let read = transfer(IoOpcode::Read, 0, 512, host.scratch());
    host.submit(1, read);
    host.poll();
    assert!(!event.drain());
    enable_msi(&mut host, 5);
    host.poll();
    assert!(event.drain());
    let mut status = [0; 2];
    host.endpoint.read(FunctionRegion::Config, 6, &mut status).unwrap();
    assert_eq!(status[0] & 8, 0, "the pin is not used");
}
