//! Interrupts as the host receives them: MSI-X by eventfd, and the pin.

use rackbus_memory::Event;
use rackbus_pci::Work;
use rackbus_pci::endpoint::IrqChange;

use super::*;

/// Offset of the MSI-X capability's message control in configuration space, and its enable bit.
fn enable_msix(host: &mut Host) {
    let mut pointer = [0];
    host.endpoint.read(Region::Config, 0x34, &mut pointer).unwrap();
    let mut at = u64::from(pointer[0]);
    loop {
        let mut capability = [0; 2];
        host.endpoint.read(Region::Config, at, &mut capability).unwrap();
        if capability[0] == 0x11 {
            break;
        }
        assert_ne!(capability[1], 0, "no MSI-X capability");
        at = u64::from(capability[1]);
    }
    let mut control = [0; 2];
    host.endpoint.read(Region::Config, at + 2, &mut control).unwrap();
    control[1] |= 0x80;
    host.endpoint.write(Region::Config, at + 2, &control).unwrap();
}

fn wire(host: &mut Host, vector: u32) -> Event {
    let event = Event::new().unwrap();
    let fd = event.as_fd().try_clone_to_owned().unwrap();
    host.endpoint.set_irqs(IrqChange::WireMsix(vector, vec![Some(fd)])).unwrap();
    event
}

#[test]
fn a_batch_of_completions_is_one_interrupt() {
    let mut host = Host::with_memory(1 << 20);
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
    let mut host = Host::with_memory(1 << 20);
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
    let mut host = Host::with_memory(1 << 20);
    // Creating the queues left no completion unread.
    let event = Event::new().unwrap();
    let fd = event.as_fd().try_clone_to_owned().unwrap();
    host.endpoint.set_irqs(IrqChange::WireIntx(Some(fd))).unwrap();
    let buffer = host.scratch();
    let pin = |host: &mut Host| {
        let mut status = [0; 2];
        host.endpoint.read(Region::Config, 6, &mut status).unwrap();
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
