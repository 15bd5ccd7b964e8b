//! `libsisci.so`: the SISCI API, so that its programs run on rackbus as they are.
//!
//! The C headers are in `include/`, programs on them in `tools/` and `tests/c/`.

pub mod constants;
