//! rackbus pci.
