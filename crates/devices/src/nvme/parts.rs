//! Which part of a drive each of its functions has (pure).
//!
//! Parts are noted when they are given out, and stay where they are: whatever the rack file says later of other
//! functions, no data moves, and no part covers another. A part grows where there is room behind it and never
//! becomes smaller; that of a function which the rack file names no more is kept.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Parts begin and end at multiples of this: the page cache's unit, so that no page has data of two.
pub const ALIGNMENT: u64 = 4096;

/// Bytes `start` to `start + size` of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveSpan {
    /// Offset in the drive's file at which the part begins, in bytes.
    pub start: u64,
    /// Size of the part in bytes.
    pub size: u64,
}

impl DriveSpan {
    fn end(&self) -> Option<u64> {
        self.start.checked_add(self.size)
    }
}

/// The parts of a drive that were given out, by the function's name: `vf1`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Parts(BTreeMap<String, DriveSpan>);

/// Why functions cannot have parts of the sizes that they are to have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// What is noted cannot be.
    #[error("the noted parts overlap, or end beyond the drive's {0} bytes")]
    Invalid(u64),
    /// A function would lose data.
    #[error("{name} has {has} bytes, and is to have {wanted}: parts do not become smaller")]
    Smaller {
        /// The function that was to become smaller.
        name: String,
        /// Bytes that it has.
        has: u64,
        /// Bytes that it is to have.
        wanted: u64,
    },
    /// A function cannot grow.
    #[error("{name} cannot grow from {has} to {wanted} bytes: {room} bytes are free behind it")]
    NoRoomBehind {
        /// The function that was to grow.
        name: String,
        /// Bytes that it has.
        has: u64,
        /// Bytes that it is to have.
        wanted: u64,
        /// Bytes that nobody has behind it.
        room: u64,
    },
    /// There is no room.
    #[error("there is no room for the {wanted} bytes of {name}: {largest} bytes are free in one piece{}", unnamed(.kept))]
    NoRoom {
        /// The function that was to get a part.
        name: String,
        /// Bytes that it is to have.
        wanted: u64,
        /// Bytes of the largest piece that nobody has.
        largest: u64,
        /// Functions that have a part and are not asked for.
        kept: Vec<String>,
    },
}

fn unnamed(names: &[String]) -> String {
    match names {
        [] => String::new(),
        names => format!(" ({} is kept, which the rack file does not name)", names.join(", ")),
    }
}

impl Parts {
    /// The part of `name`.
    pub fn get(&self, name: &str) -> Option<DriveSpan> {
        self.0.get(name).copied()
    }

    /// Gives parts of the drive's `capacity` bytes to all of `wanted`, by name and size, which are multiples of
    /// [`ALIGNMENT`].
    ///
    /// # Errors
    /// [`PartsError`]; nothing has changed then.
    pub fn give(&mut self, wanted: &[(String, u64)], capacity: u64) -> Result<(), PartsError> {
        if !self.is_sound(capacity) {
            return Err(PartsError::Invalid(capacity));
        }
        let mut parts = self.clone();
        for (name, size) in wanted {
            parts.grow(name, *size, capacity)?;
        }
        let is_new = |(name, _): &&(String, u64)| !parts.0.contains_key(name);
        let new: Vec<_> = wanted.iter().filter(is_new).cloned().collect();
        for (name, size) in new {
            parts.add(name, size, capacity, wanted)?;
        }
        *self = parts;
        Ok(())
    }

    fn is_sound(&self, capacity: u64) -> bool {
        let mut before = 0;
        self.in_order().iter().all(|part| {
            let fits = part.start >= before && part.end().is_some_and(|end| end <= capacity);
            before = part.end().unwrap_or(u64::MAX);
            fits
        })
    }

    fn in_order(&self) -> Vec<DriveSpan> {
        let mut parts: Vec<DriveSpan> = self.0.values().copied().collect();
        parts.sort_by_key(|part| part.start);
        parts
    }

    fn grow(&mut self, name: &str, wanted: u64, capacity: u64) -> Result<(), PartsError> {
        let Some(DriveSpan { start, size: has }) = self.get(name) else { return Ok(()) };
        let name = name.to_owned();
        if wanted < has {
            return Err(PartsError::Smaller { name, has, wanted });
        }
        let behind = self.0.values().map(|part| part.start).filter(|other| *other > start);
        let room = behind.min().unwrap_or(capacity) - start - has;
        if wanted - has > room {
            return Err(PartsError::NoRoomBehind { name, has, wanted, room });
        }
        self.0.insert(name, DriveSpan { start, size: wanted });
        Ok(())
    }

    /// The first place that is large enough.
    fn add(
        &mut self,
        name: String,
        size: u64,
        capacity: u64,
        wanted: &[(String, u64)],
    ) -> Result<(), PartsError> {
        let (mut at, mut largest) = (0, 0);
        let ends = self.in_order().into_iter().map(|part| (part.start, part.start + part.size));
        for (start, end) in ends.chain([(capacity, capacity)]) {
            if start - at >= size {
                self.0.insert(name, DriveSpan { start: at, size });
                return Ok(());
            }
            (at, largest) = (end, largest.max(start - at));
        }
        let named = |name: &&String| wanted.iter().any(|(wanted, _)| wanted == *name);
        let kept = self.0.keys().filter(|name| !named(name)).cloned().collect();
        Err(PartsError::NoRoom { name, wanted: size, largest, kept })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: u64 = 64 * ALIGNMENT;

    fn wanted(sizes: &[(u8, u64)]) -> Vec<(String, u64)> {
        sizes.iter().map(|(number, pages)| (format!("vf{number}"), pages * ALIGNMENT)).collect()
    }

    proptest! {
        /// Through any changes of the rack file: no part moves, shrinks or covers another, each function has
        /// what it asks for, and what is refused changes nothing.
        #[test]
        fn parts_stay_where_they_are(
            changes in prop::collection::vec(
                prop::collection::btree_map(1u8..8, 1u64..24, 0..6), 1..8),
        ) {
            let mut parts = Parts::default();
            for change in changes {
                let change: Vec<_> = change.into_iter().collect();
                let (before, wanted) = (parts.clone(), wanted(&change));
                match parts.give(&wanted, CAPACITY) {
                    Err(_) => prop_assert_eq!(&parts, &before),
                    Ok(()) => {
                        prop_assert!(parts.is_sound(CAPACITY));
                        for (name, size) in wanted {
                            prop_assert_eq!(parts.get(&name).unwrap().size, size);
                        }
                        for (name, old) in &before.0 {
                            let new = parts.get(name).unwrap();
                            prop_assert!(new.start == old.start && new.size >= old.size);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn impossible_parts_are_refused_with_the_reason() {
        let mut parts = Parts::default();
        parts.give(&wanted(&[(1, 16), (2, 16)]), CAPACITY).unwrap();
        let refused = |sizes: &[(u8, u64)]| {
            parts.clone().give(&wanted(sizes), CAPACITY).unwrap_err().to_string()
        };
        let said = refused(&[(1, 8)]);
        assert_eq!(said, "vf1 has 65536 bytes, and is to have 32768: parts do not become smaller");
        let said = refused(&[(1, 17)]);
        let expected = "vf1 cannot grow from 65536 to 69632 bytes: 0 bytes are free behind it";
        assert_eq!(said, expected);
        let said = refused(&[(1, 16), (3, 33)]);
        let expected = "there is no room for the 135168 bytes of vf3: 131072 bytes are free in one piece (vf2 is \
                        kept, which the rack file does not name)";
        assert_eq!(said, expected);
        parts.give(&wanted(&[(2, 48)]), CAPACITY).unwrap();
        assert_eq!(
            parts.get("vf2"),
            Some(DriveSpan { start: 16 * ALIGNMENT, size: 48 * ALIGNMENT })
        );
    }

    #[test]
    fn noted_parts_that_cannot_be_are_refused() {
        let page = ALIGNMENT;
        for noted in [
            [(0, 2 * page), (page, page)],
            [(0, page), (63 * page, 2 * page)],
            [(0, page), (page, u64::MAX)],
        ] {
            let part = |(start, size)| DriveSpan { start, size };
            let named = ["vf1", "vf2"].map(str::to_owned).into_iter().zip(noted.map(part));
            let mut parts = Parts(named.collect());
            let refused = parts.give(&wanted(&[(3, 1)]), CAPACITY);
            assert_eq!(refused, Err(PartsError::Invalid(CAPACITY)));
        }
    }
}
