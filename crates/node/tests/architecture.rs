//! The table of classes, placements and links in ARCHITECTURE.md has a row for each class that can be lent, each placement
//! and each link, and each row names tests that exist, so none stays behind when a class is added or a test is renamed.

use std::path::{Path, PathBuf};

use rackbus_devices::class::state_versions;

/// A row of the table.
struct Row {
    class: String,
    placement: String,
    link: String,
    tests: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What stands between backticks.
fn names(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, after) = text.split_once("| class | placement | link |").expect("the table");
    let lines = after.lines().skip(2).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, class, placement, link, _works, tests, _] = cells[..] else {
            panic!("another number of columns: {line}")
        };
        let [class, placement, link] = [class, placement, link].map(str::to_owned);
        Row { class, placement, link, tests: names(tests) }
    };
    lines.map(row).collect()
}

/// Whether a file, or one below a folder, has this in it.
fn has(path: &Path, text: &str) -> bool {
    if !path.is_dir() {
        return std::fs::read_to_string(path).is_ok_and(|source| source.contains(text));
    }
    let entries = std::fs::read_dir(path).unwrap();
    entries.into_iter().any(|entry| has(&entry.unwrap().path(), text))
}

/// Whether there is the function that is named behind `::` (scenarios of the end-to-end tests have no attribute), a test
/// in the file or folder that is named alone, or the Makefile's target.
fn exists(name: &str) -> bool {
    if let Some(target) = name.strip_prefix("make ") {
        return has(&root().join("Makefile"), &format!("\n{target}:"));
    }
    let (place, function) = match name.split_once("::") {
        Some((place, function)) => (place, Some(function)),
        None => (name, None),
    };
    let wanted = function.map_or("#[test]".to_owned(), |function| format!("fn {function}("));
    let path = root().join("crates").join(place);
    path.exists() && (has(&path, &wanted) || (function.is_none() && has(&path, "#[tokio::test")))
}

#[test]
fn each_row_names_tests_that_exist() {
    let rows = rows();
    assert!(rows.len() > 30, "only {} rows were found", rows.len());
    for Row { class, placement, link, tests } in rows {
        let row = format!("{class}, {placement}, {link}");
        assert!(tests.iter().any(|test| test.contains("::")), "{row}: no test is named");
        for test in &tests {
            assert!(exists(test), "{row}: there is no test {test}");
        }
    }
}

#[test]
fn each_class_has_a_row_for_each_placement_and_link() {
    let rows = rows();
    // What other programs serve has no state that is saved, and functions of the machine have no model.
    let classes = state_versions().map(|(class, _)| class).chain(["upstream", "vfio"]);
    for class in classes {
        for placement in ["lender", "borrower"] {
            for link in ["shm", "tcp"] {
                let is_it = |row: &&Row| {
                    [class, "any"].contains(&row.class.as_str())
                        && row.placement == placement
                        && [link, "any"].contains(&row.link.as_str())
                };
                let found = rows.iter().filter(is_it).count();
                assert_eq!(found, 1, "{class} with the front at its {placement} over {link}");
            }
        }
    }
}

/// In a host's own tree some classes work and all others are refused; an RDMA lane is there for whatever has a front of its own.
#[test]
fn each_class_has_a_row_for_a_hosts_own_tree_and_for_the_rdma_lane() {
    let rows = rows();
    let has_row = |class: &str, is_it: fn(&Row) -> bool| {
        let mut rows = rows.iter().filter(|row| is_it(row));
        rows.any(|row| {
            let mut named = row.class.split([',', ' ']);
            row.class.starts_with("any") || named.any(|word| word == class)
        })
    };
    for class in state_versions().map(|(class, _)| class).chain(["upstream", "vfio"]) {
        assert!(has_row(class, |row| row.placement == "host"), "{class} in a host's own tree");
    }
    for (class, _) in state_versions() {
        assert!(has_row(class, |row| row.link.contains("RDMA")), "{class} with an RDMA lane");
    }
}
