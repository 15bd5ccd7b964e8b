//! From TOML to a [`Rack`], with the place of everything that is wrong.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::names::{self, is_name};
use super::values::{DURATIONS, SIZES, format_size, parse_duration_ms, parse_size};
use super::{
    Adapter, Backing, Cable, Control, Device, DeviceKind, Host, Nvme, Physical, Rack, RackError,
    Switch,
};

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Something wrong at a place in the text.
#[derive(Debug)]
pub(super) struct Problem {
    span: Range<usize>,
    what: String,
    allowed: String,
}

type Outcome<T> = Result<T, Problem>;

fn wrong<T>(span: Range<usize>, what: impl Into<String>, allowed: impl Into<String>) -> Outcome<T> {
    Err(Problem { span, what: what.into(), allowed: allowed.into() })
}

impl Problem {
    pub(super) fn locate(self, file: &str, text: &str) -> RackError {
        let before = text.get(..self.span.start).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        let Problem { what, allowed, .. } = self;
        RackError { file: file.to_owned(), line, column, what, allowed }
    }
}

/// A table whose keys are taken one by one; what is left over is unknown.
struct Section<'a> {
    table: &'a DeTable<'a>,
    span: Range<usize>,
    /// Where it is, for messages: "the rack file", "device alpha/nvme0".
    place: String,
    known: &'static [&'static str],
}

impl<'a> Section<'a> {
    fn new(
        value: &'a DeTable<'a>,
        span: Range<usize>,
        place: impl Into<String>,
        known: &'static [&'static str],
    ) -> Outcome<Self> {
        let section = Section { table: value, span, place: place.into(), known };
        for key in section.table.keys() {
            let name: &str = key.get_ref();
            if !known.contains(&name) {
                let what = format!("unknown key `{name}` in {}", section.place);
                let near = closest(name, known.iter().copied());
                let allowed = match near {
                    Some(near) => format!("did you mean `{near}`? Allowed are {}", list(known)),
                    None => format!("allowed are {}", list(known)),
                };
                return wrong(key.span(), what, allowed);
            }
        }
        Ok(section)
    }

    fn get(&self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        debug_assert!(self.known.contains(&key));
        self.table.get(key)
    }

    fn require<T>(&self, key: &str, found: Option<T>, allowed: &str) -> Outcome<T> {
        match found {
            Some(value) => Ok(value),
            None => wrong(self.span.clone(), format!("{} has no `{key}`", self.place), allowed),
        }
    }

    fn text(&self, key: &'static str, allowed: &str) -> Outcome<Option<(&'a str, Range<usize>)>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.get_ref() {
                DeValue::String(text) => Ok(Some((text.as_ref(), value.span()))),
                other => wrong(value.span(), mismatch(key, other), allowed),
            },
        }
    }

    fn truth(&self, key: &'static str) -> Outcome<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.get_ref() {
                DeValue::Boolean(truth) => Ok(Some(*truth)),
                other => wrong(value.span(), mismatch(key, other), "write true or false"),
            },
        }
    }

    fn number(&self, key: &'static str, allowed: &str) -> Outcome<Option<(u64, Range<usize>)>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match integer(value.get_ref()) {
                Some(number) => Ok(Some((number, value.span()))),
                None => wrong(value.span(), mismatch(key, value.get_ref()), allowed),
            },
        }
    }

    /// One of a few numbers.
    fn choice(&self, key: &'static str, choices: &[u8]) -> Outcome<Option<u8>> {
        let words: Vec<String> = choices.iter().map(u8::to_string).collect();
        let allowed = format!("`{key}` is one of {}", words.join(", "));
        let Some((number, span)) = self.number(key, &allowed)? else {
            return Ok(None);
        };
        match choices.iter().find(|choice| u64::from(**choice) == number) {
            Some(choice) => Ok(Some(*choice)),
            None => wrong(span, format!("`{key}` is {number}"), allowed),
        }
    }

    /// A size in bytes within limits.
    fn size(&self, key: &'static str, least: u64, most: u64) -> Outcome<Option<u64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let found = match value.get_ref() {
            DeValue::String(text) => parse_size(text),
            other => integer(other),
        };
        let Some(bytes) = found else {
            return wrong(value.span(), format!("`{key}` is no size"), SIZES);
        };
        if !(least..=most).contains(&bytes) {
            let allowed = format!("it is from {} to {}", format_size(least), format_size(most));
            return wrong(value.span(), format!("`{key}` is {}", format_size(bytes)), allowed);
        }
        Ok(Some(bytes))
    }

    /// A duration in milliseconds within limits, which are given in milliseconds.
    fn duration(&self, key: &'static str, least: u64, most: u64) -> Outcome<Option<u64>> {
        let Some((text, span)) = self.text(key, DURATIONS)? else {
            return Ok(None);
        };
        match parse_duration_ms(text) {
            Some(ms) if (least..=most).contains(&ms) => Ok(Some(ms)),
            Some(_) => wrong(
                span,
                format!("`{key}` is {text}"),
                format!("it is from {least} ms to {} s", most / 1000),
            ),
            None => wrong(span, format!("`{key}` is no duration"), DURATIONS),
        }
    }

    /// The tables under `key`, by name, in the file's order.
    fn tables(&self, key: &'static str) -> Outcome<Vec<Named<'a>>> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let DeValue::Table(table) = value.get_ref() else {
            let allowed = format!("write a table: [{key}.NAME]");
            return wrong(value.span(), mismatch(key, value.get_ref()), allowed);
        };
        let mut found = Vec::new();
        for (name, value) in table {
            let text: &str = name.get_ref();
            if !is_name(text) {
                return wrong(name.span(), format!("`{text}` is no name"), names::ALLOWED);
            }
            match value.get_ref() {
                DeValue::Table(table) => {
                    found.push(Named { name: text, span: name.span(), table });
                }
                other => {
                    let allowed = format!("write a table: [{key}.{text}]");
                    return wrong(value.span(), mismatch(text, other), allowed);
                }
            }
        }
        found.sort_by_key(|entry| entry.span.start);
        Ok(found)
    }
}

struct Named<'a> {
    name: &'a str,
    span: Range<usize>,
    table: &'a DeTable<'a>,
}

fn integer(value: &DeValue<'_>) -> Option<u64> {
    match value {
        DeValue::Integer(number) => u64::from_str_radix(number.as_str(), number.radix()).ok(),
        _ => None,
    }
}

fn mismatch(key: &str, found: &DeValue<'_>) -> String {
    match found {
        DeValue::Integer(number) => format!("`{key}` is the number {number}"),
        other => format!("`{key}` is a {}", other.type_str()),
    }
}

fn list(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

/// The word that was probably meant: at most two edits away, or a third of its length.
fn closest<'w>(wrong: &str, words: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    let scored = words.map(|word| (distance(wrong, word), word));
    scored.filter(|(edits, word)| *edits <= 2.min(word.len() / 2)).min().map(|(_, word)| word)
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

pub(super) fn parse(text: &str) -> Outcome<Rack> {
    let root = DeTable::parse(text).map_err(|error| Problem {
        span: error.span().unwrap_or(0..0),
        what: error.message().trim().replace('\n', ", "),
        allowed: "the file is TOML (https://toml.io)".to_owned(),
    })?;
    let top = Section::new(
        root.get_ref(),
        0..0,
        "the rack file",
        &["name", "hosts", "control", "fabric"],
    )?;
    let allowed = "write name = \"…\" at the top";
    let (name, span) = top.require("name", top.text("name", allowed)?, allowed)?;
    if !is_name(name) {
        return wrong(span, format!("`{name}` is no name"), names::ALLOWED);
    }
    let hosts = top.tables("hosts")?.iter().map(host).collect::<Outcome<Vec<_>>>()?;
    if hosts.is_empty() {
        return wrong(0..0, "the rack has no host", "write [hosts.NAME] for each host");
    }
    let control = match top.get("control") {
        Some(value) => control(value)?,
        None => Control::default(),
    };
    let fabric = match top.get("fabric") {
        Some(value) => Some(fabric(value, &hosts)?),
        None => None,
    };
    let rack = Rack { name: name.to_owned(), hosts, control, fabric };
    if let Err(error) = crate::derive::topology(&rack) {
        let span = top.get("fabric").map_or(0..0, Spanned::span);
        return wrong(span, error.to_string(), "parts of one host are joined freely");
    }
    Ok(rack)
}

fn subsection<'a>(
    value: &'a Spanned<DeValue<'a>>,
    place: &str,
    known: &'static [&'static str],
) -> Outcome<Section<'a>> {
    match value.get_ref() {
        DeValue::Table(table) => Section::new(table, value.span(), place, known),
        other => wrong(value.span(), mismatch(place, other), format!("write a table: [{place}]")),
    }
}

fn host(entry: &Named<'_>) -> Outcome<Host> {
    let place = format!("host {}", entry.name);
    let known = &["memory", "iommu", "devices"];
    let section = Section::new(entry.table, entry.span.clone(), place, known)?;
    Ok(Host {
        name: entry.name.to_owned(),
        memory: section.size("memory", 64 * MIB, 64 * TIB)?.unwrap_or(4096 * MIB),
        iommu: section.truth("iommu")?.unwrap_or(true),
        devices: section
            .tables("devices")?
            .iter()
            .map(|device_entry| device(entry.name, device_entry))
            .collect::<Outcome<_>>()?,
    })
}

/// The kinds of device that there are.
const KINDS: &[&str] = &["nvme"];

fn device(host: &str, entry: &Named<'_>) -> Outcome<Device> {
    let function = format!("{host}/{}", entry.name);
    let known = &["kind", "size", "block_size", "backing", "serial"];
    let section =
        Section::new(entry.table, entry.span.clone(), format!("device {function}"), known)?;
    let allowed = format!("`kind` is one of {}", list(KINDS));
    let (kind, span) = section.require("kind", section.text("kind", &allowed)?, &allowed)?;
    match kind {
        "nvme" => {
            let kind = DeviceKind::Nvme(nvme(&section, &function)?);
            Ok(Device { name: entry.name.to_owned(), kind })
        }
        _ => wrong(span, format!("there is no kind of device `{kind}`"), allowed),
    }
}

fn nvme(section: &Section<'_>, function: &str) -> Outcome<Nvme> {
    let size = section.require("size", section.size("size", MIB, 64 * TIB)?, SIZES)?;
    let block_size = match section.number("block_size", BLOCKS)? {
        None => 512,
        Some((512, _)) => 512,
        Some((4096, _)) => 4096,
        Some((other, span)) => return wrong(span, format!("`block_size` is {other}"), BLOCKS),
    };
    if size % u64::from(block_size) != 0 {
        let span = section.get("size").map_or(section.span.clone(), Spanned::span);
        let what = format!("`size` is {}", format_size(size));
        return wrong(
            span,
            what,
            format!("it is a multiple of the block size, {block_size} bytes"),
        );
    }
    let backing = match section.text("backing", BACKINGS)? {
        None | Some(("file", _)) => Backing::State,
        Some(("memory", _)) => Backing::Memory,
        Some(("null", _)) => Backing::Null,
        // A path has a slash, so that a misspelt word does not become a file.
        Some((path, _)) if path.contains('/') => Backing::Path(PathBuf::from(path)),
        Some((other, span)) => {
            return wrong(span, format!("there is no backing `{other}`"), BACKINGS);
        }
    };
    let serial = match section.text("serial", SERIALS)? {
        None => default_serial(function),
        Some((text, _)) if is_serial(text) => text.to_owned(),
        Some((text, span)) => return wrong(span, format!("`{text}` is no serial number"), SERIALS),
    };
    Ok(Nvme { size, block_size, backing, serial })
}

const BLOCKS: &str = "a block has 512 or 4096 bytes";
const BACKINGS: &str = "`backing` is \"file\" (kept in the state directory), \"memory\", \"null\", or \
                        a path with a `/` in it (\"./disk.img\", \"/dev/sdb\")";
const SERIALS: &str = "a serial number has 1 to 20 printable ASCII characters";

fn is_serial(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|b| (0x20..0x7f).contains(&b))
}

/// A serial number made of the function's name: the name where it fits, else a digest of it, so
/// that no two drives of a rack have the same (guests make `/dev/disk/by-id` names of it).
fn default_serial(function: &str) -> String {
    let plain = function.replace('/', "-");
    if plain.len() <= 20 {
        return plain;
    }
    // FNV-1a.
    let digest = function.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{}-{digest:016x}", &plain[..3])
}

fn control(value: &Spanned<DeValue<'_>>) -> Outcome<Control> {
    let section = subsection(value, "control", &["lease_ttl", "return_grace"])?;
    let default = Control::default();
    Ok(Control {
        lease_ttl_ms: section
            .duration("lease_ttl", 100, 3_600_000)?
            .unwrap_or(default.lease_ttl_ms),
        return_grace_ms: section
            .duration("return_grace", 100, 600_000)?
            .unwrap_or(default.return_grace_ms),
    })
}

fn fabric(value: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Outcome<Physical> {
    let section = subsection(value, "fabric", &["adapters", "switches", "links"])?;
    let mut names: BTreeSet<String> = BTreeSet::new();
    for host in hosts {
        names.insert(host.name.clone());
        names.extend(host.devices.iter().map(|d| format!("{}/{}", host.name, d.name)));
    }
    let mut adapters = Vec::new();
    for entry in section.tables("adapters")? {
        let place = format!("adapter {}", entry.name);
        let part = Section::new(entry.table, entry.span.clone(), place, &["host"])?;
        let host = part.require("host", placed(&part, hosts)?, "write host = \"…\"")?;
        take_name(&mut names, &entry)?;
        adapters.push(Adapter { name: entry.name.to_owned(), host });
    }
    let mut switches = Vec::new();
    for entry in section.tables("switches")? {
        let place = format!("switch {}", entry.name);
        let part = Section::new(entry.table, entry.span.clone(), place, &["host"])?;
        take_name(&mut names, &entry)?;
        switches.push(Switch { name: entry.name.to_owned(), host: placed(&part, hosts)? });
    }
    let links = match section.get("links") {
        Some(value) => links(value, &names)?,
        None => Vec::new(),
    };
    Ok(Physical { adapters, switches, links })
}

/// The host that a part names as its own.
fn placed(part: &Section<'_>, hosts: &[Host]) -> Outcome<Option<String>> {
    let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    let allowed = format!("`host` is one of {}", list(&known));
    match part.text("host", &allowed)? {
        Some((host, _)) if known.contains(&host) => Ok(Some(host.to_owned())),
        Some((host, span)) => wrong(span, format!("there is no host `{host}`"), allowed),
        None => Ok(None),
    }
}

fn take_name(names: &mut BTreeSet<String>, entry: &Named<'_>) -> Outcome<()> {
    match names.insert(entry.name.to_owned()) {
        true => Ok(()),
        false => wrong(
            entry.span.clone(),
            format!("`{}` names two parts", entry.name),
            "hosts, adapters and switches have different names",
        ),
    }
}

fn links(value: &Spanned<DeValue<'_>>, names: &BTreeSet<String>) -> Outcome<Vec<Cable>> {
    let form = "write [[fabric.links]] with ends = [\"A\", \"B\"], generation and lanes";
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), mismatch("links", value.get_ref()), form);
    };
    let mut links = Vec::new();
    for entry in entries.iter() {
        let section = subsection(entry, "fabric.links", &["ends", "generation", "lanes"])?;
        let ends = section.require("ends", section.get("ends"), form)?;
        let DeValue::Array(pair) = ends.get_ref() else {
            return wrong(ends.span(), mismatch("ends", ends.get_ref()), form);
        };
        let mut found = Vec::new();
        for end in pair.iter() {
            match end.get_ref() {
                DeValue::String(name) if names.contains(name.as_ref()) => {
                    found.push(name.to_string());
                }
                DeValue::String(name) => {
                    let known: Vec<&str> = names.iter().map(String::as_str).collect();
                    let allowed = format!("an end is one of {}", list(&known));
                    return wrong(end.span(), format!("there is no `{name}`"), allowed);
                }
                other => return wrong(end.span(), mismatch("ends", other), form),
            }
        }
        let ends: [String; 2] = match found.try_into() {
            Ok(pair) => pair,
            Err(_) => return wrong(ends.span(), "`ends` does not name two", form),
        };
        if ends[0] == ends[1] {
            return wrong(entry.span(), format!("a link from {0} to {0}", ends[0]), form);
        }
        links.push(Cable {
            ends,
            generation: section.choice("generation", &[1, 2, 3, 4, 5, 6])?.unwrap_or(3),
            lanes: section.choice("lanes", &[1, 2, 4, 8, 16])?.unwrap_or(8),
        });
    }
    Ok(links)
}
