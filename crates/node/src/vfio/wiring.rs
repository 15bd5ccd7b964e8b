//! Which interrupts of a physical function are enabled, and where they are wired to (pure).
//!
//! The kernel enables one kind at a time: the pin, MSI or MSI-X, messages with a number of vectors that cannot
//! always grow. A user wires vectors before or after it enabled them, some at a time, and the pin beside them.
//! This has what the user wired, and says what is to be asked of the kernel.

use std::ops::Range;

use rackbus_vfio::InterruptIndex;

/// What is to be asked of the kernel, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WiringStep {
    /// Disables all interrupts of this kind.
    Off(InterruptIndex),
    /// Wires these vectors of a kind as they are [noted](Wiring::events); the first enables it.
    Wire(InterruptIndex, Range<u32>),
    /// Rings these vectors: one may have been raised while their kind was off.
    Ring(InterruptIndex, Range<u32>),
}

/// Vectors that the function has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoVector;

/// What a user has wired, and what the kernel has enabled of it, as another process goes on with it.
#[derive(Debug)]
pub struct WiredEvents<E> {
    /// Vectors, each with its event.
    pub vectors: Vec<(u32, E)>,
    /// The event of the pin.
    pub pin: Option<E>,
    /// The kind that the kernel has enabled, and with how many vectors.
    pub live: Option<(InterruptIndex, u32)>,
}

/// What the kernel has enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Live {
    Nothing,
    Pin,
    Messages(InterruptIndex, u32),
}

/// The interrupts of one function, wired to events of its user's.
#[derive(Debug)]
pub struct Wiring<E> {
    msi: u32,
    msix: u32,
    vectors: Vec<Option<E>>,
    pin: Option<E>,
    /// The kind of messages that the user enabled in configuration space.
    enabled: Option<InterruptIndex>,
    live: Live,
    grows: bool,
}

impl<E> Wiring<E> {
    /// Of a function with so many vectors of MSI and of MSI-X; `grows` where the kernel adds vectors of MSI-X to
    /// those that are in use.
    pub fn new(msi: u32, msix: u32, grows: bool) -> Wiring<E> {
        let vectors = (0..msi.max(msix)).map(|_| None).collect();
        Wiring { msi, msix, vectors, pin: None, enabled: None, live: Live::Nothing, grows }
    }

    /// The same of a function that goes on: of what is enabled nothing changes. `enabled` is the kind of messages that its
    /// user enabled in configuration space.
    ///
    /// # Errors
    /// When it has no such vectors.
    pub fn with_events(
        self,
        events: WiredEvents<E>,
        enabled: Option<InterruptIndex>,
    ) -> Result<Wiring<E>, NoVector> {
        let mut wiring = Wiring { pin: events.pin, enabled, ..self };
        for (vector, event) in events.vectors {
            *wiring.vectors.get_mut(vector as usize).ok_or(NoVector)? = Some(event);
        }
        let most = |kind| if kind == InterruptIndex::Msi { wiring.msi } else { wiring.msix };
        wiring.live = match events.live {
            None => Live::Nothing,
            Some((InterruptIndex::Intx, _)) => Live::Pin,
            Some((kind @ (InterruptIndex::Msi | InterruptIndex::Msix), count))
                if count <= most(kind) =>
            {
                Live::Messages(kind, count)
            }
            Some(_) => return Err(NoVector),
        };
        Ok(wiring)
    }

    /// What is wired and enabled.
    pub fn wired(&self) -> WiredEvents<&E> {
        let vectors = (0..).zip(&self.vectors);
        WiredEvents {
            vectors: vectors.filter_map(|(at, event)| Some((at, event.as_ref()?))).collect(),
            pin: self.pin.as_ref(),
            live: match self.live {
                Live::Nothing => None,
                Live::Pin => Some((InterruptIndex::Intx, 1)),
                Live::Messages(kind, count) => Some((kind, count)),
            },
        }
    }

    /// The user wires vectors from `start` on, or takes their wires away.
    ///
    /// # Errors
    /// When there are not so many; nothing changes then.
    pub fn wire(
        &mut self,
        start: u32,
        events: Vec<Option<E>>,
    ) -> Result<Vec<WiringStep>, NoVector> {
        let first = start as usize;
        let end = first.checked_add(events.len()).filter(|end| *end <= self.vectors.len());
        let range = start..u32::try_from(end.ok_or(NoVector)?).map_err(|_| NoVector)?;
        for (slot, event) in self.vectors[first..].iter_mut().zip(events) {
            *slot = event;
        }
        Ok(self.settle(range))
    }

    /// The user takes all wires of vectors away.
    pub fn unwire(&mut self) -> Vec<WiringStep> {
        self.vectors.iter_mut().for_each(|slot| *slot = None);
        self.settle(0..0)
    }

    /// The user wires the pin, or takes its wire away.
    pub fn wire_pin(&mut self, event: Option<E>) -> Vec<WiringStep> {
        self.pin = event;
        // Another event in the place of the one that is wired.
        let again = self.live == Live::Pin && self.pin.is_some();
        let mut steps = self.settle(0..0);
        if again && steps.is_empty() {
            steps.push(WiringStep::Wire(InterruptIndex::Intx, 0..1));
        }
        steps
    }

    /// The user enabled a kind of messages in configuration space, or none.
    pub fn enable(&mut self, kind: Option<InterruptIndex>) -> Vec<WiringStep> {
        self.enabled = kind;
        self.settle(0..0)
    }

    /// The kernel refused a step: nothing is enabled.
    pub fn failed(&mut self) {
        self.live = Live::Nothing;
    }

    /// Whether the pin is what the kernel signals.
    pub fn pin_is_live(&self) -> bool {
        self.live == Live::Pin
    }

    /// The kind of messages that the kernel signals.
    pub fn live_messages(&self) -> Option<InterruptIndex> {
        match self.live {
            Live::Messages(kind, _) => Some(kind),
            _ => None,
        }
    }

    /// What vectors of a kind are wired to.
    pub fn events(&self, kind: InterruptIndex, range: Range<u32>) -> Vec<Option<&E>> {
        match kind {
            InterruptIndex::Intx => vec![self.pin.as_ref()],
            _ => range.map(|vector| self.vectors.get(vector as usize)?.as_ref()).collect(),
        }
    }

    /// What should be enabled: messages before the pin, as many vectors as the last that is wired.
    fn wanted(&self) -> Live {
        let kind = self.enabled.unwrap_or(match self.msix {
            0 => InterruptIndex::Msi,
            _ => InterruptIndex::Msix,
        });
        let most = if kind == InterruptIndex::Msi { self.msi } else { self.msix };
        let wired = self.vectors.iter().take(most as usize).rposition(Option::is_some);
        match (wired, &self.pin) {
            (Some(last), _) => Live::Messages(kind, last as u32 + 1),
            (None, Some(_)) => Live::Pin,
            (None, None) => Live::Nothing,
        }
    }

    /// The steps from what is enabled to what should be; `changed` are vectors with another wire.
    fn settle(&mut self, changed: Range<u32>) -> Vec<WiringStep> {
        let (was, wanted) = (self.live, self.wanted());
        self.live = wanted;
        if let (Live::Messages(kind, had), Live::Messages(wants, count)) = (was, wanted)
            && kind == wants
            && (count <= had || (self.grows && kind == InterruptIndex::Msix))
        {
            // Fewer are as many as before, of which some have no wire.
            let count = count.max(had);
            self.live = Live::Messages(kind, count);
            let range = changed.start.min(count)..changed.end.min(count);
            return if range.is_empty() { Vec::new() } else { vec![WiringStep::Wire(kind, range)] };
        }
        if was == wanted {
            return Vec::new();
        }
        let off = |live| match live {
            Live::Nothing => None,
            Live::Pin => Some(WiringStep::Off(InterruptIndex::Intx)),
            Live::Messages(kind, _) => Some(WiringStep::Off(kind)),
        };
        let mut steps: Vec<WiringStep> = off(was).into_iter().collect();
        match wanted {
            Live::Nothing => {}
            Live::Pin => steps.push(WiringStep::Wire(InterruptIndex::Intx, 0..1)),
            Live::Messages(kind, count) => {
                steps.push(WiringStep::Wire(kind, 0..count));
                if let Live::Messages(_, had) = was {
                    steps.push(WiringStep::Ring(kind, 0..had.min(count)));
                }
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::InterruptIndex::{Intx, Msi, Msix};
    use super::WiringStep::{Off, Ring, Wire};
    use super::*;

    #[test]
    fn vectors_are_msix_unless_the_user_enabled_msi() {
        let mut wiring = Wiring::new(1, 4, false);
        assert_eq!(wiring.wire(0, vec![Some('a'), Some('b')]), Ok(vec![Wire(Msix, 0..2)]));
        assert_eq!(wiring.events(Msix, 0..3), [Some(&'a'), Some(&'b'), None]);
        let steps = wiring.enable(Some(Msi));
        assert_eq!(steps, [Off(Msix), Wire(Msi, 0..1), Ring(Msi, 0..1)]);
        assert_eq!(wiring.wire(3, vec![Some('c'), None]), Err(NoVector));
        assert_eq!(wiring.wire(u32::MAX, vec![Some('c')]), Err(NoVector));
    }

    #[test]
    fn messages_take_the_place_of_the_pin_and_give_it_back() {
        let mut wiring = Wiring::new(0, 2, false);
        assert_eq!(wiring.wire_pin(Some('p')), [Wire(Intx, 0..1)]);
        assert_eq!(wiring.wire_pin(Some('q')), [Wire(Intx, 0..1)]);
        assert_eq!(wiring.wire(0, vec![Some('a')]), Ok(vec![Off(Intx), Wire(Msix, 0..1)]));
        assert_eq!(wiring.wire_pin(Some('r')), []);
        assert_eq!(wiring.unwire(), [Off(Msix), Wire(Intx, 0..1)]);
        assert!(wiring.pin_is_live());
        assert_eq!(wiring.wire_pin(None), [Off(Intx)]);
        assert_eq!(wiring.unwire(), []);
    }

    #[test]
    fn more_vectors_begin_anew_where_the_kernel_cannot_add_them_and_the_old_ones_are_rung() {
        for (grows, steps) in [
            (false, vec![Off(Msix), Wire(Msix, 0..3), Ring(Msix, 0..1)]),
            (true, vec![Wire(Msix, 2..3)]),
        ] {
            let mut wiring = Wiring::new(0, 8, grows);
            assert_eq!(wiring.wire(0, vec![Some('a')]), Ok(vec![Wire(Msix, 0..1)]));
            assert_eq!(wiring.wire(2, vec![Some('b')]), Ok(steps));
            // Fewer stay enabled; a vector that loses its wire is told alone.
            assert_eq!(wiring.wire(2, vec![None]), Ok(vec![Wire(Msix, 2..3)]));
            assert_eq!(wiring.wire(1, vec![Some('c')]), Ok(vec![Wire(Msix, 1..2)]));
        }
    }

    fn copied(wiring: &Wiring<char>) -> WiredEvents<char> {
        let WiredEvents { vectors, pin, live } = wiring.wired();
        let vectors = vectors.into_iter().map(|(at, event)| (at, *event)).collect();
        WiredEvents { vectors, pin: pin.copied(), live }
    }

    #[test]
    fn a_function_that_goes_on_is_wired_as_it_was_and_nothing_is_asked_of_the_kernel_for_it() {
        let mut wiring = Wiring::new(2, 8, false);
        assert!(wiring.wire(0, vec![Some('a'), None, Some('c')]).is_ok());
        wiring.wire_pin(Some('p'));
        let go_on = |wired| Wiring::new(2, 8, false).with_events(wired, Some(Msix)).unwrap();
        let mut after = go_on(copied(&wiring));
        assert_eq!(after.live_messages(), Some(Msix));
        assert_eq!(after.wire(1, vec![Some('b')]), Ok(vec![Wire(Msix, 1..2)]));
        assert_eq!(after.events(Msix, 0..3), [Some(&'a'), Some(&'b'), Some(&'c')]);
        assert_eq!(after.unwire(), [Off(Msix), Wire(Intx, 0..1)]);
        let mut after = go_on(copied(&after));
        assert!(after.pin_is_live());
        assert_eq!(after.wire_pin(None), [Off(Intx)]);
        assert_eq!(go_on(copied(&after)).wire_pin(None), []);
    }

    #[test]
    fn vectors_that_a_function_has_not_are_refused_where_it_goes_on() {
        let refused = |vectors, live| {
            let wired = WiredEvents { vectors, pin: None, live };
            Wiring::new(1, 4, false).with_events(wired, None).err()
        };
        assert_eq!(refused(vec![(3, 'a')], Some((Msix, 4))), None);
        for (vectors, live) in [
            (vec![(4, 'a')], None),
            (Vec::new(), Some((Msi, 2))),
            (Vec::new(), Some((Msix, 5))),
            (Vec::new(), Some((InterruptIndex::Error, 1))),
        ] {
            assert_eq!(refused(vectors, live), Some(NoVector), "{live:?}");
        }
    }

    #[test]
    fn after_a_refusal_the_next_wire_begins_anew() {
        let mut wiring = Wiring::new(0, 2, true);
        assert!(wiring.wire(0, vec![Some('a')]).is_ok());
        wiring.failed();
        assert_eq!(wiring.wire(1, vec![Some('b')]), Ok(vec![Wire(Msix, 0..2)]));
    }

    /// Whatever a user does in whatever order, what is enabled is what it wired.
    #[test]
    fn any_order_of_changes_ends_with_what_is_wired() {
        let mut seed = 7u64;
        let mut random = |most: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % most
        };
        let mut wiring = Wiring::new(2, 5, false);
        let mut on: Option<(InterruptIndex, Vec<Option<u64>>)> = None;
        for _ in 0..20_000 {
            let steps = match random(5) {
                0 => wiring.unwire(),
                1 => wiring.wire_pin(Some(random(9)).filter(|n| *n > 3)),
                2 => wiring.enable([None, Some(Msi), Some(Msix)][random(3) as usize]),
                _ => {
                    let start = random(5) as u32;
                    let events = (0..random(4)).map(|_| Some(random(9)).filter(|n| *n > 2));
                    wiring.wire(start, events.collect()).unwrap_or_default()
                }
            };
            for step in steps {
                match (step, &mut on) {
                    (Off(kind), Some((enabled, _))) if kind == *enabled => on = None,
                    (Wire(kind, range), None) => {
                        assert_eq!(range.start, 0);
                        let events = wiring.events(kind, range);
                        on = Some((kind, events.into_iter().map(|event| event.copied()).collect()));
                    }
                    (Wire(kind, range), Some((enabled, events))) if kind == *enabled => {
                        let new = wiring.events(kind, range.clone());
                        for (vector, event) in range.zip(new) {
                            events[vector as usize] = event.copied();
                        }
                    }
                    (Ring(kind, _), Some((enabled, _))) if kind == *enabled => {}
                    (step, on) => panic!("{step:?} while {on:?} is enabled"),
                }
            }
            match (&on, wiring.live) {
                (None, Live::Nothing) => {}
                (Some((Intx, events)), Live::Pin) => assert_eq!(events, &[wiring.pin]),
                (Some((kind, events)), Live::Messages(live, count)) => {
                    assert_eq!((*kind, events.len()), (live, count as usize));
                    assert_eq!(events[..], wiring.vectors[..events.len()]);
                }
                (on, live) => panic!("{on:?} is enabled and {live:?} is meant"),
            }
        }
    }
}
