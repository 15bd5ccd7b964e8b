//! What was borrowed for this host, by the names that the module keeps.

use super::*;

#[test]
fn what_was_borrowed_by_a_lease_is_known_by_its_name_however_long_that_is() {
    assert_eq!(lease_name(7, "alpha/nvme0"), "lease 7: alpha/nvme0");
    for function in ["f".repeat(40), "g".repeat(200), "\u{e9}".repeat(40)] {
        let name = lease_name(u64::MAX, &function);
        assert!(name.len() <= NAME_BYTES, "{name}");
        assert!(is_of_lease(&name), "{name}");
    }
    assert!(is_of_lease("alpha/nvme0 by lease 7"), "of an earlier version");
    for by_hand in ["alpha/nvme0", "lease", "lease x: y", "lease 7", "released: 7"] {
        assert!(!is_of_lease(by_hand), "{by_hand}");
    }
}
