//! Rackbus' own message by which a driver, or a node for its driver, asks for registers as memory.

use rackbus_spec::vfio_user::Registers;

use super::{Reply, exact, invalid};
use crate::vfio_user::device::{RequestRefused, ServedDevice};
use crate::vfio_user::wire::WireMessage;

/// A PCI function has BARs 0 to 5.
const BARS: u8 = 6;

pub(super) fn answer(
    device: &dyn ServedDevice,
    message: &WireMessage,
) -> Result<Reply, RequestRefused> {
    let asked: Registers = exact(message)?;
    if !message.fds.is_empty() {
        return Err(invalid("REGISTERS takes no descriptor"));
    }
    let bar = u8::try_from(asked.bar).ok().filter(|bar| *bar < BARS);
    let bar = bar.ok_or_else(|| invalid(format!("there is no BAR {}", asked.bar)))?;
    let (file, size) = device.registers(bar)?;
    let mut reply = Reply::head(&Registers { size, ..asked });
    reply.fds.push(file);
    Ok(reply)
}
