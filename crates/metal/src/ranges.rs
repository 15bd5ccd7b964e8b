//! What is mapped of a lent function for its borrower's processors: in the IOMMU domain of the NTB, where their accesses arrive.

use std::sync::Arc;

use rackbus_memory::Access;
use rackbus_vfio::{Container, VfioError};

use crate::device::{BarMap, LentBars, not_lendable};
use crate::error::MetalError;
use crate::window::{AREA, ControlArea};

/// What a borrower may do with registers.
const ACCESS: Access = Access::READ.union(Access::WRITE);

/// A control area and BARs in the IOMMU domain of the NTB, until this is dropped.
#[derive(Debug)]
pub(crate) struct WindowRanges {
    container: Arc<Container>,
    /// Those of the control area.
    area: Vec<(u64, u64)>,
    /// Those of the BARs, in their order.
    bars: Vec<(u64, u64)>,
    /// The BARs are mapped.
    has_bars: bool,
}

impl WindowRanges {
    /// Lends a control area and BARs at offsets of the borrower's window, which arrives at `inbound`.
    ///
    /// # Errors
    /// When VFIO refuses; nothing is mapped then.
    pub fn lend(
        container: &Arc<Container>,
        (inbound, control, offsets): (u64, u64, &[u64]),
        area: &ControlArea,
        bars: Vec<BarMap>,
    ) -> Result<WindowRanges, MetalError> {
        let of_bars = bars.iter().zip(offsets).map(|(bar, offset)| (inbound + offset, bar.size));
        let of_bars = of_bars.collect();
        let container = container.clone();
        let mut ranges =
            WindowRanges { container, area: Vec::new(), bars: of_bars, has_bars: false };
        for (offset, memory, access) in area.parts() {
            let iova = inbound + control + offset;
            ranges.container.map(iova, memory, access)?;
            ranges.area.push((iova, memory.len() as u64));
        }
        ranges.lend_bars(bars)?;
        Ok(ranges)
    }

    /// Those of another process, whose control area begins at `begin`.
    pub fn again(container: &Arc<Container>, ranges: &[(u64, u64)], begin: u64) -> WindowRanges {
        let of_area = begin..begin + AREA as u64;
        let (area, bars) = ranges.iter().partition(|(iova, _)| of_area.contains(iova));
        WindowRanges { container: container.clone(), area, bars, has_bars: true }
    }

    /// Ends a mapping, if it has not ended before: an end of all may have failed at a later one.
    fn end(&self, (iova, bytes): (u64, u64)) -> Result<(), VfioError> {
        match self.container.unmap(iova, bytes) {
            Err(VfioError::NotMapped { .. }) => Ok(()),
            ended => ended,
        }
    }

    fn unmap(&self, ranges: &[(u64, u64)]) {
        for range in ranges {
            if let Err(error) = self.end(*range) {
                tracing::error!(iova = range.0, %error, "a lent function's window stays mapped");
            }
        }
    }
}

/// What is mapped for a borrower: dropped, it is not mapped any more.
pub(crate) trait LentRanges: LentBars + Send {
    /// First address and length of each range.
    fn ranges(&self) -> Vec<(u64, u64)>;
}

impl LentRanges for WindowRanges {
    fn ranges(&self) -> Vec<(u64, u64)> {
        [&self.area[..], &self.bars[..]].concat()
    }
}

impl LentBars for WindowRanges {
    fn end_bars(&mut self) -> Result<(), MetalError> {
        if self.has_bars {
            for range in &self.bars {
                self.end(*range)?;
            }
            self.has_bars = false;
        }
        Ok(())
    }

    fn lend_bars(&mut self, bars: Vec<BarMap>) -> Result<(), MetalError> {
        let sizes = |bars: &[BarMap]| bars.iter().map(|bar| bar.size).collect::<Vec<_>>();
        if sizes(&bars) != self.bars.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>() {
            return Err(not_lendable("the function", "its BARs are others now"));
        }
        for (nth, bar) in bars.into_iter().enumerate() {
            let mapped = self.container.map(self.bars[nth].0, bar.target, ACCESS);
            mapped.inspect_err(|_| self.unmap(&self.bars[..nth]))?;
        }
        self.has_bars = true;
        Ok(())
    }
}

impl Drop for WindowRanges {
    fn drop(&mut self) {
        self.unmap(&self.area);
        if self.has_bars {
            self.unmap(&self.bars);
        }
    }
}
