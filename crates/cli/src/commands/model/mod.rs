//! `rackbus model`: what latency and bandwidth a rack's flows will get.

mod broken;
mod live;
mod place;
mod profile;
mod profiles;
mod reproduce;
mod run;
mod slots;
mod trace;
mod variants;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::text::FileError;
use rackbus_model::timing::{self, Timing};
use rackbus_model::workload::{self, Divided, Failed, HostProfile, NamedText, Results, Workload};

use crate::Common;
use crate::commands::misread;
use crate::output::{Failure, Output};

/// Time a rack before it is built: the fabric's latency and bandwidth, with contention.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model reproduce                       the papers' figures, published and modelled
  rackbus model run rack.toml workload.toml     what each flow will get, and where it is held up
  rackbus model run --live                      the running rack, with its leases as the workload
  rackbus model trace rack.toml workload.toml   one job, hop by hop
  rackbus model profiles genoa                  what a host can be taken to be, and why")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Place(place::Args),
    Profile(profile::Args),
    Profiles(profiles::Args),
    Reproduce(reproduce::Args),
    Run(run::Args),
    Trace(trace::Args),
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Command::Place(args) => args.run(output),
            Command::Profile(args) => args.run(output),
            Command::Profiles(args) => args.run(output),
            Command::Reproduce(args) => args.run(output),
            Command::Run(args) => args.run(common, output).await,
            Command::Trace(args) => args.run(output),
        }
    }
}

/// A file's name and text.
#[derive(Debug, Clone, Default)]
struct Source {
    name: String,
    text: String,
    /// The folder from which the file names others; the current one where it is no file.
    folder: PathBuf,
    /// Whether the text is another than the file's: then what is wrong has no place there.
    changed: bool,
}

impl Source {
    fn read(file: &Path) -> Result<Source, Failure> {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|cause| {
            Failure::usage(format!("{name}: {cause}"), "name a text file that can be read")
        })?;
        let folder = file.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Source { name, text, folder, changed: false })
    }

    /// The file with another text, and in its name how that came to be.
    fn changed(&self, text: String, how: &str) -> Source {
        let (name, folder) = (format!("{} {how}", self.name), self.folder.clone());
        Source { name, text, folder, changed: true }
    }

    /// What is wrong with it, or with a file that it names.
    fn misread(&self, error: FileError) -> Failure {
        if self.changed && error.file == self.name {
            return Failure::usage(format!("{}: {}", error.file, error.what), error.allowed);
        }
        misread(error)
    }

    /// The name and the text of a file that this one names.
    fn beside(&self, name: &str) -> Result<NamedText, String> {
        let file = self.folder.join(name);
        let text = std::fs::read_to_string(&file).map_err(|cause| cause.to_string())?;
        Ok((file.display().to_string(), text))
    }
}

/// A rack, its timing and what moves in it.
#[derive(Debug)]
struct Case {
    rack: Rack,
    timing: Timing,
    workload: Workload,
    /// The workload's text, for the places of what does not fit.
    source: Source,
}

impl Case {
    fn read(rack: &Source, workload: &Source) -> Result<Case, Failure> {
        let (parsed, _) =
            parse_rack(&rack.name, &rack.text).map_err(|error| rack.misread(error))?;
        let timing = timing::read_for(&rack.name, &rack.text, &parsed);
        let timing = timing.map_err(|error| rack.misread(error))?;
        let beside = |name: &str| workload.beside(name);
        let flows = workload::parse_with(&workload.name, &workload.text, &beside);
        let flows = flows.map_err(|error| workload.misread(error))?;
        Ok(Case { rack: parsed, timing, workload: flows, source: workload.clone() })
    }

    /// Simulates it in at most `most` events of each of its independent parts, on so many processors.
    fn simulate(&self, most: u64, threads: usize) -> Result<Results, Failed> {
        let mut divided = Divided::new(&self.rack, &self.timing, &self.workload)?;
        let threads = threads.min(divided.len());
        divided.go(most, &|work| {
            std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
        })?;
        Ok(divided.results())
    }

    /// What did not run, for people.
    fn failure(&self, failed: Failed) -> Failure {
        match failed {
            Failed::Wrong(problem) => {
                let error = problem.locate(&self.source.name, &self.source.text);
                self.source.misread(error)
            }
            Failed::Rack(error) => remedied(&error.to_string(), true),
            Failed::Stuck(error) => remedied(&error.to_string(), false),
        }
    }
}

/// A message that ends with its remedy.
fn remedied(text: &str, usage: bool) -> Failure {
    let (error, remedy) = text.split_once("; ").unwrap_or((text, "see `rackbus model --help`"));
    if usage { Failure::usage(error, remedy) } else { Failure::new(error, remedy) }
}

/// Writes a file, and its folder where there is none.
fn write(file: &Path, text: &str) -> Result<(), Failure> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(file, text));
    written.map_err(|cause| {
        Failure::new(format!("{}: {cause}", file.display()), "name a place that can be written")
    })
}

/// What hosts were taken to be, in a line.
fn taken_to_be(hosts: &[HostProfile]) -> String {
    let mut profiles: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for host in hosts {
        profiles.entry(&host.profile).or_default().push(&host.host);
    }
    let profiles = profiles.into_iter().map(|(profile, hosts)| match hosts.len() {
        0..=8 => format!("{profile} ({})", hosts.join(", ")),
        many => format!("{profile} ({many} hosts)"),
    });
    format!("hosts are taken to be: {}", profiles.collect::<Vec<_>>().join(", "))
}

/// A time of so many nanoseconds with a fitting unit: `1.25 us`.
fn span(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        1e3..1e6 => format!("{:.2} us", ns / 1e3),
        _ => format!("{:.2} ms", ns / 1e6),
    }
}

/// Bytes per second, for people.
fn rate(bytes: f64) -> String {
    match bytes {
        ..1e6 => format!("{:.1} KB/s", bytes / 1e3),
        1e6..1e9 => format!("{:.1} MB/s", bytes / 1e6),
        _ => format!("{:.3} GB/s", bytes / 1e9),
    }
}
