//! The targets on the command line: their names, their seeds, and an input run again.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use rackbus_fuzz::{TARGETS, Target, target};

#[derive(Debug, Parser)]
#[command(about = "What `make fuzz` runs, by hand")]
enum Command {
    /// Prints the names of all targets, a line each.
    List,
    /// Writes a target's seeds and its words (as `words`, for libFuzzer's -dict) into a folder.
    Seeds { target: String, folder: PathBuf },
    /// Runs one input: what `make fuzz` prints for a failure.
    Replay { target: String, file: PathBuf },
}

fn find(name: &str) -> Result<&'static Target, String> {
    target(name).ok_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        format!("there is no target `{name}`; there are {}", names.join(", "))
    })
}

fn write_seeds(target: &Target, folder: &Path) -> std::io::Result<()> {
    let seeds = folder.join("seeds");
    std::fs::create_dir_all(&seeds)?;
    for (nth, seed) in (target.seeds)().iter().enumerate() {
        std::fs::write(seeds.join(format!("seed-{nth}")), seed)?;
    }
    let quoted = |word: &&str| format!("\"{}\"\n", word.escape_default());
    // libFuzzer takes no empty file.
    let words =
        "# words of inputs\n".to_owned() + &target.words.iter().map(quoted).collect::<String>();
    std::fs::write(folder.join("words"), words)
}

fn run(command: Command) -> Result<(), String> {
    match command {
        Command::List => TARGETS.iter().for_each(|target| println!("{}", target.name)),
        Command::Seeds { target, folder } => {
            write_seeds(find(&target)?, &folder)
                .map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        Command::Replay { target, file } => {
            let data = std::fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            (find(&target)?.run)(&data);
            println!("{target}: {} bytes, nothing is wrong", data.len());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
