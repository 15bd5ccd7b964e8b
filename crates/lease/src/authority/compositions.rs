//! Compositions are saved and forgotten.

use super::undo::Undo;
use super::{Authority, Decision, Record};
use crate::composition::{CompositionRecord, CompositionRefused};
use crate::message::Millis;

impl Authority {
    /// Saves a composition, to be borrowed by its name. To save the same again changes nothing.
    ///
    /// # Errors
    /// [`CompositionRefused`]; nothing changes then.
    pub fn compose(
        &mut self,
        now: Millis,
        composition: CompositionRecord,
    ) -> Result<Decision, CompositionRefused> {
        self.enter(now);
        composition.check()?;
        match self.compositions.get(&composition.name) {
            Some(known) if *known == composition => {}
            Some(_) => return Err(CompositionRefused::Exists(composition.name)),
            None => {
                let name = composition.name.clone();
                self.undo.push(Undo::Composition(name.clone(), None));
                self.outcome.records.push(Record::Composition(composition.clone()));
                self.compositions.insert(name, composition);
            }
        }
        Ok(self.take())
    }

    /// Forgets a composition. What is borrowed of it stays so.
    ///
    /// # Errors
    /// [`CompositionRefused::Unknown`].
    pub fn dissolve(&mut self, now: Millis, name: &str) -> Result<Decision, CompositionRefused> {
        self.enter(now);
        let Some(composition) = self.compositions.remove(name) else {
            return Err(CompositionRefused::Unknown(name.to_owned()));
        };
        self.undo.push(Undo::Composition(name.to_owned(), Some(composition)));
        self.outcome.records.push(Record::Dissolved { name: name.to_owned() });
        Ok(self.take())
    }

    /// The compositions that were saved, by name.
    pub fn compositions(&self) -> impl Iterator<Item = &CompositionRecord> {
        self.compositions.values()
    }
}
