//! What a flush of a connector's host waits for: that what was stored is at the memory's home, and where that has told it to
//! further machines, at those as well. So who sees on a third machine what was stored after a flush sees what was stored
//! before it.
//!
//! A host looks at its memory in cycles; one ends when all that it found has taken effect at the home. Where the home said
//! of any of it that further machines have the memory, the flush is passed on: the home answers when it has flushed to
//! them all that had taken effect.

/// A conversation in which this host is the connector.
#[derive(Debug, Default)]
pub struct FlushLedger {
    /// How many flushes were asked for, and how many of those have ended as far as the home is concerned.
    wanted: u64,
    done: u64,
    /// Whether something took effect since the last passing on that further machines are to have.
    unpassed: bool,
    /// Number of the last passing on that was asked for, with the flushes that it is for; until it is answered.
    asked: u64,
    covers: Option<(u64, u64)>,
    /// The flushes that need no passing on any more.
    passed: u64,
}

impl FlushLedger {
    /// Asks for a flush of what was stored before: its number.
    pub fn want(&mut self) -> u64 {
        self.wanted += 1;
        self.wanted
    }

    /// The last flush that was asked for: a cycle that begins now is for it.
    pub fn wanted(&self) -> u64 {
        self.wanted
    }

    /// Whether a cycle is due for a flush.
    pub fn has_waiting(&self) -> bool {
        self.wanted > self.done
    }

    /// Something took effect at a home that tells it to further machines.
    pub fn is_told_on(&mut self) {
        self.unpassed = true;
    }

    /// Whether something that took effect at a home is to be at further machines, and not known to be.
    pub fn is_passing(&self) -> bool {
        self.unpassed || self.covers.is_some()
    }

    /// A cycle has ended that was for the flushes up to `wanted`, and all that was stored has taken effect. The number of
    /// the passing on that is to be asked for, if one is.
    pub fn cycle_ended(&mut self, wanted: u64) -> Option<u64> {
        self.done = self.done.max(wanted);
        if !self.unpassed {
            self.settle();
            return None;
        }
        if self.done <= self.passed || self.covers.is_some() {
            // Nobody waits, or the next is asked for when this one is answered.
            return None;
        }
        self.unpassed = false;
        self.asked += 1;
        self.covers = Some((self.asked, self.done));
        Some(self.asked)
    }

    /// The home has passed on. False when that was not asked for.
    #[must_use]
    pub fn passed_on(&mut self, number: u64) -> bool {
        match self.covers {
            Some((asked, flushes)) if asked == number => {
                self.covers = None;
                self.passed = self.passed.max(flushes);
                self.settle();
                true
            }
            _ => false,
        }
    }

    /// The conversation has ended: nothing of it is waited for.
    pub fn end(&mut self) {
        (self.unpassed, self.covers) = (false, None);
        self.settle();
    }

    /// Whether a flush has ended.
    pub fn is_done(&self, flush: u64) -> bool {
        self.done >= flush && self.passed >= flush
    }

    /// Whether all that was stored before a flush has taken effect at the other side, whether or not it is told on from there.
    /// Who passes a flush on waits for no more than this: homes that wait for each other's passing on, in a ring, would
    /// wait for ever.
    pub fn has_taken_effect(&self, flush: u64) -> bool {
        self.done >= flush
    }

    /// Where nothing is to be passed on, all that is done needs none.
    fn settle(&mut self) {
        if !self.unpassed && self.covers.is_none() {
            self.passed = self.done;
        }
    }
}
