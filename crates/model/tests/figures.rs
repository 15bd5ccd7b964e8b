//! The papers' figures as the model has them, kept in a file: a change of the model shows in review.
//!
//! `RACKBUS_UPDATE=1 cargo test -p rackbus-model --test figures` writes the file anew.

use std::fmt::Write;
use std::path::Path;

use rackbus_model::reproduce::{Kind, Row, Verdict, headline, pictures, rows, testbeds};

fn table(rows: &[Row]) -> String {
    let mut text = format!("# {}\n", headline(rows));
    text += &String::from(
        "# id | case | published | modelled | unit | error | kind | verdict | what the paper says, and why it misses\n",
    );
    for row in rows {
        let verdict = if row.verdict == Verdict::Ok { "ok" } else { "MISS" };
        let error = match row.kind {
            Kind::Relation => format!("margin {:.3}", row.error),
            _ => format!("{:+.2} %", row.error * 100.0),
        };
        let says = match (&row.says, row.range) {
            (Some(says), _) => says.clone(),
            (None, Some((least, most))) => format!("{least} to {most}"),
            (None, None) => String::new(),
        };
        let fitted = row.fitted.map(|fitted| format!(" [sets {fitted}]")).unwrap_or_default();
        let note = row.note.map(|note| format!(" [{note}]")).unwrap_or_default();
        let _ = writeln!(
            text,
            "{} | {} | {} | {} | {} | {error} | {} | {verdict} | {says}{fitted}{note}",
            row.id, row.case, row.published, row.modelled, row.unit, row.kind
        );
    }
    text
}

#[test]
fn figures_are_as_they_were() {
    let rows = rows();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/figures.golden");
    let now = table(&rows);
    if std::env::var_os("RACKBUS_UPDATE").is_some() {
        std::fs::write(&file, &now).unwrap();
    }
    let before = std::fs::read_to_string(&file).unwrap();
    for (was, is) in before.lines().zip(now.lines()) {
        assert_eq!(is, was, "if this is meant, run with RACKBUS_UPDATE=1 and commit the change");
    }
    assert_eq!(before.lines().count(), now.lines().count());
    drawn(&rows);
    told(&rows);
    // Every figure of the papers that a model answers to has its row, and a miss says why.
    let numbers = |paper: &str, of: &[u32]| {
        of.iter().map(|number| format!("{paper}{number}")).collect::<Vec<_>>()
    };
    let mut wanted = numbers("DL", &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17]);
    wanted.extend(numbers("M", &(1..=16).collect::<Vec<_>>()));
    wanted.extend(numbers("S", &[1, 2, 5]));
    wanted.extend(numbers("A", &[4, 5, 6, 7, 8, 9]));
    wanted.extend(numbers("P", &[1, 2, 3, 4, 5, 6]));
    wanted.extend(numbers("G", &[1, 2, 3]));
    for id in wanted {
        assert!(rows.iter().any(|row| row.id == id), "{id} has no row");
    }
    for row in rows.iter().filter(|row| row.verdict == Verdict::Miss) {
        assert!(row.note.is_some(), "{} {} misses without a reason", row.id, row.case);
    }
}

/// README and book say what the rows come to.
fn told(rows: &[Row]) {
    for file in ["README.md", "docs/book/src/validation.md"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
        let text = std::fs::read_to_string(&file).unwrap().replace("\n> ", "\n");
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let says = words(&text).contains(&words(&headline(rows)));
        assert!(says, "{} does not say: {}", file.display(), headline(rows));
    }
}

/// The book's pictures are those of the rows.
fn drawn(rows: &[Row]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/figures");
    for (name, now) in pictures(rows) {
        let file = folder.join(format!("{name}.svg"));
        if std::env::var_os("RACKBUS_UPDATE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&file, &now).unwrap();
        }
        let before = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(before == now, "{name}.svg is another: run with RACKBUS_UPDATE=1 and commit it");
    }
}

#[test]
fn the_testbeds_are_those_of_the_folder() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/testbeds");
    let mut files: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let mut known: Vec<String> =
        testbeds().iter().map(|(name, _)| format!("{name}.toml")).collect();
    known.sort();
    assert_eq!(files, known);
}
