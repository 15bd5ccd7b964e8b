//! The model's report in a browser: its script runs, its slider colours links and fills tables.
//!
//! `RACKBUS_BROWSER` names a headless Chromium, as `make test` does after `scripts/setup browser`. Without it
//! the test takes what the machine has; where that is nothing, it checks that the page is written.

use std::path::{Path, PathBuf};
use std::process::Command;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/model").join(name)
}

/// A browser; one that is named must be there.
fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("RACKBUS_BROWSER") {
        let named = PathBuf::from(named);
        assert!(named.exists(), "RACKBUS_BROWSER is {}, which is not there", named.display());
        return Some(named);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-headless-shell", "chromium-browser", "google-chrome"];
    let all = std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name)));
    all.into_iter().find(|file| file.exists())
}

/// The page's elements, as they are after its script has run.
fn opened(browser: &Path, page: &Path, slice: usize) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("file://{}#{slice}", page.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What stands between two texts.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let rest = text.split_once(from).unwrap_or_else(|| panic!("no {from} in the page")).1;
    rest.split_once(to).unwrap().0
}

#[test]
fn the_slider_shows_a_moment() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    let output = Command::new(env!("CARGO_BIN_EXE_rackbus"))
        .args(["model", "run"])
        .args([example("rack.toml"), example("workload.toml")])
        .arg("--report")
        .arg(&page)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = std::fs::read_to_string(&page).unwrap();
    assert!(written.starts_with("<!DOCTYPE html>") && written.ends_with("</html>\n"));
    let Some(browser) = browser() else {
        eprintln!("no browser here: the page was written, and not opened");
        return;
    };
    let (whole, moment) = (opened(&browser, &page, 0), opened(&browser, &page, 30));
    for (dom, slice) in [(&whole, "0"), (&moment, "30")] {
        assert!(!dom.contains("data-error=\""), "{}", between(dom, "data-error=\"", "\""));
        assert_eq!(between(dom, "<body data-slice=\"", "\""), slice);
    }
    let when = |dom: &str| {
        let tag = between(dom, "id=\"when\"", "</output>");
        tag.split_once('>').unwrap().1.to_owned()
    };
    assert_eq!(when(&whole), "all the time");
    assert!(when(&moment).starts_with("until 2."), "{}", when(&moment));
    // The script has coloured the links by their loads, and not all alike.
    let topology = between(&whole, "id=\"topology\"", "</svg>");
    let colours: std::collections::BTreeSet<&str> =
        topology.split("stroke=\"hsl(").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(colours.len() >= 3, "{colours:?}");
    let rows = |dom: &str| between(dom, "<table id=\"links\">", "</table>").to_owned();
    assert_ne!(rows(&whole), rows(&moment), "the tables are of that moment");
}
