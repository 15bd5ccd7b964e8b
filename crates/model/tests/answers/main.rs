//! Answers to rack files as a planner writes a first one: parts without links, jobs as long as the window,
//! default values. Each was wrong once, without a word.

mod ample;
mod cxl;
mod ends;
mod engines;
mod groups;
mod lab;
mod links;
mod lives;
mod loads;
mod media;
mod messages;
mod names;
mod own;
mod parts;
mod pictures;
mod played;
mod rates;
mod refused;
mod shaping;
mod untried;
mod used;
mod windows;
