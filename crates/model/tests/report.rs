//! The report of a workload is one well-formed page that shows what the results say, whatever names are in it.

use rackbus_fabric::rack::{FunctionLimit, LimitCounts, Rack};
use rackbus_model::workload::{self, Results, watch};
use rackbus_model::{report, timing};
use roxmltree::{Document, Node};

const RACK: &str = include_str!("../../../examples/model/rack.toml");
const WORKLOAD: &str = include_str!("../../../examples/model/workload.toml");

/// What comes of the example, with another name for its first flow.
fn simulated(name: &str) -> (Results, String) {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    let mut workload = workload::parse("workload.toml", WORKLOAD).unwrap();
    name.clone_into(&mut workload.flows[0].name);
    let plain = workload::run(&rack, &timing, &workload, 100_000_000).unwrap();
    let (results, page) = report::simulate(&rack, &timing, &workload, 100_000_000).unwrap();
    assert_eq!(results, plain, "being watched changes nothing");
    (results, page)
}

/// The page's elements; its first line is a document type that is no XML.
fn document(page: &str) -> Document<'_> {
    let (first, rest) = page.split_once('\n').unwrap();
    assert_eq!(first, "<!DOCTYPE html>");
    Document::parse(rest).unwrap()
}

fn named<'a>(page: &'a Document<'_>, id: &str) -> Node<'a, 'a> {
    page.descendants().find(|node| node.attribute("id") == Some(id)).unwrap()
}

fn text(node: Node<'_, '_>) -> String {
    node.descendants().filter_map(|node| node.text().filter(|_| node.is_text())).collect()
}

fn numbers(page: &Document<'_>, name: &str) -> Vec<Vec<u64>> {
    let line = |line: &str| line.split(' ').map(|word| word.parse().unwrap()).collect();
    named(page, "data").attribute(name).unwrap().split(';').map(line).collect()
}

#[test]
fn the_page_shows_what_the_results_say() {
    let (results, page) = simulated("database");
    let page = document(&page);
    let mut attributes = page.descendants().flat_map(|node| node.attributes());
    assert!(attributes.all(|a| !["src", "href"].contains(&a.name())), "the page is self-contained");
    let said = text(named(&page, "bottlenecks"));
    assert!(said.contains("lender/root cuts reads"), "{said}");
    assert!(said.contains("results (2") && said.contains("gets all that is asked for"), "{said}");
    let rows = named(&page, "flows")
        .descendants()
        .filter(|node| node.has_tag_name(("http://www.w3.org/1999/xhtml", "tr")));
    assert_eq!(rows.count(), 1 + results.flows.len());
    // A row for each busy link, and two lines in the picture for each but those to memory.
    let links = page.descendants().filter(|node| node.attribute("data-link").is_some());
    assert!(links.filter(|node| node.tag_name().name() == "g").count() >= 8);
    let (loads, rates) = (numbers(&page, "data-loads"), numbers(&page, "data-rates"));
    assert_eq!((loads.len(), rates.len()), (report::SLICES + 1, report::SLICES + 1));
    assert!(loads.iter().all(|line| line.len() == 2 * results.links.len()));
}

#[test]
fn the_page_names_a_limit_of_the_rack_file_that_holds_a_flow_up() {
    let mut rack = Rack::parse("rack.toml", RACK).unwrap();
    let mut devices = rack.hosts.iter_mut().flat_map(|host| &mut host.devices);
    let drive = devices.find(|device| device.name == "nvme0").unwrap();
    let (counts, rate) = (LimitCounts::Bytes, 100_000_000);
    drive.timing.limits = vec![FunctionLimit { counts, rate, burst: rate / 20 }];
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    let workload = workload::parse("workload.toml", WORKLOAD).unwrap();
    let (_, page) = report::simulate(&rack, &timing, &workload, 100_000_000).unwrap();
    let said = text(named(&document(&page), "bottlenecks"));
    let expected = "The rate of lender/nvme0 in the rack file is used up: database (100";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn slices_add_up_to_the_whole() {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    let workload = workload::parse("workload.toml", WORKLOAD).unwrap();
    let (results, slices) = watch(&rack, &timing, &workload, 100_000_000, 7).unwrap();
    let mean = |of: &dyn Fn(&workload::Slice) -> f64| {
        let mut before = workload.warmup;
        let spans = slices.iter().map(|slice| {
            let seconds = slice.until.since(std::mem::replace(&mut before, slice.until)).seconds();
            seconds * of(slice)
        });
        spans.sum::<f64>() / results.seconds
    };
    for (nth, link) in results.links.iter().enumerate() {
        let there = mean(&|slice| slice.loads[nth][0]);
        assert!((there - link.there).abs() < 1e-6, "{:?}: {there} and {}", link.ends, link.there);
    }
    for (nth, flow) in results.flows.iter().enumerate() {
        let rate = mean(&|slice| slice.rates[nth]);
        assert!((rate / flow.bytes_per_second - 1.0).abs() < 1e-6, "{}", flow.name);
    }
}

/// Once a slice's own part of the limit was told.
#[test]
fn a_report_that_takes_too_long_tells_the_limit_that_was_given() {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    let workload = workload::parse("workload.toml", WORKLOAD).unwrap();
    let events = workload::run(&rack, &timing, &workload, 100_000_000).unwrap().events;
    for most in [0, 1, events / 2, events - 1] {
        let error = report::simulate(&rack, &timing, &workload, most).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{most} events did not end it")), "{error}");
    }
}

#[test]
fn no_name_breaks_the_page() {
    // Files have no such names, but a page must not rest on that.
    let name = "a</script><b>&\"'";
    let (_, page) = simulated(name);
    let page = document(&page);
    assert!(text(named(&page, "flows")).contains(name));
    let scripts = page.descendants().filter(|node| node.tag_name().name() == "script");
    assert_eq!(scripts.count(), 1);
}
