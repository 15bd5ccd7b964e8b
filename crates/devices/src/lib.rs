//! rackbus devices.
