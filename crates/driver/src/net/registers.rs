//! The registers of a virtio function, where its capabilities say that they are.

use rackbus_spec::pcie::{capability as pci, header, msix};
use rackbus_spec::virtio::net::{config, feature};
use rackbus_spec::virtio::{
    DEVICE_ID_BASE, VENDOR_ID, capability as cap, common as reg, feature as common, status,
};

use super::ring::QueueLayout;
use super::{NetError, NetInfo};
use crate::device::DrivenFunction;

/// Where the structures are in BAR 0.
#[derive(Debug, Clone, Copy, Default)]
pub struct VirtioRegisters {
    common: u64,
    notify: u64,
    multiplier: u64,
    device: u64,
    /// Where the MSI-X capability is in configuration space, if it is shown.
    msix: Option<u64>,
}

impl VirtioRegisters {
    /// Looks for the capabilities of a network function.
    pub fn find(device: &mut dyn DrivenFunction) -> Result<VirtioRegisters, NetError> {
        let wrong = NetError::Unsupported("it is no virtio network function");
        let mut bytes = [0; 256];
        device.read_config(0, &mut bytes)?;
        let word = |at: u16| u16::from_le_bytes([bytes[at as usize], bytes[at as usize + 1]]);
        let kind = DEVICE_ID_BASE + rackbus_spec::virtio::net::DEVICE_TYPE;
        if (word(header::VENDOR_ID), word(header::DEVICE_ID)) != (VENDOR_ID, kind) {
            return Err(wrong);
        }
        let mut found = VirtioRegisters::default();
        let mut seen = 0u8;
        let mut at = usize::from(bytes[usize::from(header::CAPABILITIES_POINTER)]);
        // A list can have no more entries than fit.
        for _ in 0..48 {
            if !(0x40..0xf0).contains(&at) {
                break;
            }
            let field = |offset: usize| {
                let end = (at + offset + 4).min(bytes.len());
                let mut value = [0; 4];
                let part = &bytes[end - 4..end];
                value.copy_from_slice(part);
                u64::from(u32::from_le_bytes(value))
            };
            if bytes[at] == pci::MSIX {
                found.msix = Some(at as u64);
            }
            if bytes[at] == pci::VENDOR && bytes[at + cap::BAR] == 0 {
                let place = match bytes[at + cap::TYPE] {
                    cap::COMMON => Some(&mut found.common),
                    cap::NOTIFY => {
                        found.multiplier = field(cap::NOTIFY_MULTIPLIER);
                        Some(&mut found.notify)
                    }
                    cap::DEVICE => Some(&mut found.device),
                    _ => None,
                };
                if let Some(place) = place {
                    *place = field(cap::OFFSET);
                    seen += 1;
                }
            }
            at = usize::from(bytes[at + 1]);
        }
        if seen < 3 {
            return Err(NetError::Unsupported("its structures are not in BAR 0"));
        }
        Ok(found)
    }

    fn read<const N: usize>(
        &self,
        device: &mut dyn DrivenFunction,
        at: u64,
    ) -> Result<[u8; N], NetError> {
        let mut data = [0; N];
        device.read(at, &mut data)?;
        Ok(data)
    }

    /// Lets the function interrupt by MSI-X; false where it does not show that.
    pub fn enable_msix(&self, device: &mut dyn DrivenFunction) -> Result<bool, NetError> {
        let Some(at) = self.msix else { return Ok(false) };
        let control = msix::CONTROL_ENABLE.to_le_bytes();
        device.write_config(at + u64::from(msix::CONTROL), &control)?;
        Ok(true)
    }

    pub fn status(&self, device: &mut dyn DrivenFunction) -> Result<u8, NetError> {
        Ok(self.read::<1>(device, self.common + reg::DEVICE_STATUS)?[0])
    }

    pub fn set_status(&self, device: &mut dyn DrivenFunction, bit: u8) -> Result<(), NetError> {
        let value = self.status(device)? | bit;
        Ok(device.write(self.common + reg::DEVICE_STATUS, &[value])?)
    }

    /// Resets the device and accepts what it offers of `wanted`; answers what was accepted.
    pub fn negotiate(
        &mut self,
        device: &mut dyn DrivenFunction,
        wanted: u64,
    ) -> Result<u64, NetError> {
        device.write(self.common + reg::DEVICE_STATUS, &[0])?;
        self.set_status(device, status::ACKNOWLEDGE)?;
        self.set_status(device, status::DRIVER)?;
        let mut offered = 0;
        for half in 0..2u32 {
            device.write(self.common + reg::DEVICE_FEATURE_SELECT, &half.to_le_bytes())?;
            let word = self.read::<4>(device, self.common + reg::DEVICE_FEATURE)?;
            offered |= u64::from(u32::from_le_bytes(word)) << (32 * half);
        }
        // This driver notifies by the queue's number alone.
        let wanted = (wanted | common::VERSION_1) & !common::NOTIFICATION_DATA;
        let accepted = offered & wanted;
        for half in 0..2u32 {
            device.write(self.common + reg::DRIVER_FEATURE_SELECT, &half.to_le_bytes())?;
            let word = (accepted >> (32 * half)) as u32;
            device.write(self.common + reg::DRIVER_FEATURE, &word.to_le_bytes())?;
        }
        self.set_status(device, status::FEATURES_OK)?;
        match self.status(device)? & status::FEATURES_OK != 0 {
            true => Ok(accepted),
            false => Err(NetError::Features(accepted)),
        }
    }

    pub fn config16(&self, device: &mut dyn DrivenFunction, at: u64) -> Result<u16, NetError> {
        Ok(u16::from_le_bytes(self.read::<2>(device, self.device + at)?))
    }

    pub fn info(
        &self,
        device: &mut dyn DrivenFunction,
        features: u64,
    ) -> Result<NetInfo, NetError> {
        let mac = self.read::<6>(device, self.device + config::MAC)?;
        let pairs = match features & feature::MQ != 0 {
            true => self.config16(device, config::MAX_PAIRS)?,
            false => 1,
        };
        // Virtual I/O Device 1.2, section 5.1.4.1; with 0x8000 the control queue would have no number.
        if !(1..0x8000).contains(&pairs) {
            return Err(NetError::Unsupported("its number of queue pairs is none"));
        }
        Ok(NetInfo { features, mac, mtu: self.config16(device, config::MTU)?, pairs })
    }

    /// Enables a queue; answers where it is notified.
    pub fn enable(
        &self,
        device: &mut dyn DrivenFunction,
        number: u16,
        size: u16,
        places: QueueLayout,
        vector: Option<u16>,
    ) -> Result<u64, NetError> {
        let QueueLayout { descriptors, driver, device: used } = places;
        device.write(self.common + reg::QUEUE_SELECT, &number.to_le_bytes())?;
        device.write(self.common + reg::QUEUE_SIZE, &size.to_le_bytes())?;
        for (at, address) in
            [(reg::QUEUE_DESC, descriptors), (reg::QUEUE_DRIVER, driver), (reg::QUEUE_DEVICE, used)]
        {
            device.write(self.common + at, &(address as u32).to_le_bytes())?;
            device.write(self.common + at + 4, &((address >> 32) as u32).to_le_bytes())?;
        }
        if let Some(vector) = vector {
            device.write(self.common + reg::QUEUE_VECTOR, &vector.to_le_bytes())?;
        }
        device.write(self.common + reg::QUEUE_ENABLE, &1u16.to_le_bytes())?;
        let offset = self.read::<2>(device, self.common + reg::QUEUE_NOTIFY_OFF)?;
        Ok(self.notify + self.multiplier * u64::from(u16::from_le_bytes(offset)))
    }
}
