//! The IOMMU of a VM, as QEMU has it and as functions of others bear it.

use serde::{Deserialize, Serialize};

/// Remaps interrupts, so that a guest takes more than one of a function's MSI vectors, and has more
/// than one queue. It translates no DMA: lenders reach guest memory as it lies. With translation and
/// without `caching-mode` guests turn it on at boot, and QEMU ends.
pub(super) const REMAPPER: &str = "intel-iommu,intremap=on,dma-translation=off";

/// Translates DMA as well. QEMU tells vfio-user servers of mappings in caching mode only.
const TRANSLATOR: &str = "intel-iommu,intremap=on,caching-mode=on,device-iotlb=off";

/// What of an IOMMU a VM has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmIommu {
    /// Remaps interrupts, translates nothing.
    #[default]
    Remapping,
    /// Remaps interrupts and translates DMA, of vfio-user functions too: each mapping of the guest's is told to
    /// their servers.
    Translating,
    /// The VM has no IOMMU.
    Absent,
}

impl VmIommu {
    pub(super) fn device(self) -> Option<&'static str> {
        match self {
            VmIommu::Remapping => Some(REMAPPER),
            VmIommu::Translating => Some(TRANSLATOR),
            VmIommu::Absent => None,
        }
    }
}

pub(super) fn is_iommu(argument: &str) -> bool {
    ["intel-iommu", "amd-iommu", "virtio-iommu"].iter().any(|name| argument.contains(name))
}

/// Whether this is an IOMMU with which QEMU ends when its guest boots (11.1: `requires caching
/// mode`, then `DMA mapping failed`).
pub(super) fn ends_at_boot(argument: &str) -> bool {
    // As options or as JSON.
    let words: String = argument.chars().filter(|c| !matches!(c, '"' | ' ')).collect();
    let has = |key: &str, values: &[&str]| {
        let set = |value: &&str| {
            words.contains(&format!("{key}={value}")) || words.contains(&format!("{key}:{value}"))
        };
        values.iter().any(set)
    };
    words.contains("intel-iommu")
        && has("intremap", &["on", "true"])
        && !has("dma-translation", &["off", "false"])
        && !has("caching-mode", &["on", "true"])
}
