//! The committed OpenAPI document is the one that is served.

#[test]
fn the_committed_document_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    if std::env::var_os("RACKBUS_UPDATE").is_some() {
        std::fs::write(path, rackbus_control::openapi()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == rackbus_control::openapi(),
        "docs/openapi.json is out of date; run RACKBUS_UPDATE=1 cargo test -p rackbus-control"
    );
}
