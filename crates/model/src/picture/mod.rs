//! Pictures of results, as SVG: data in, text out.
//!
//! Each stands on a white card of its own, with a headline and its units. Labels stand at what they
//! name, so that no legend must be searched, and never over one another; numbers have few digits.
//! The same data gives the same bytes.
//!
//! * [`chart`]: lines over two axes, with what was published beside what was modelled.
//! * [`bars`]: published and modelled values beside each other.
//! * [`compare`]: two values of each case, on one scale.
//! * [`diagram`]: a rack's links and how busy they are.
//! * [`timeline`]: a transaction, hop by hop.

mod axis;
pub mod bars;
pub mod chart;
pub mod compare;
pub mod diagram;
mod distribution;
mod label;
mod layout;
mod svg;
pub mod timeline;

pub use axis::{Axis, Scale, Unit};
pub(crate) use svg::escape;

#[cfg(test)]
mod tests;
