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
    std::fs::write(folder.join("words"), dictionary(target.words))
}

/// Words as libFuzzer reads them: printable characters, and all other bytes as hexadecimal numbers.
fn dictionary(words: &[&str]) -> String {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' => format!("\\{}", char::from(byte)),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    let quoted = |word: &&str| format!("\"{}\"\n", word.bytes().map(escaped).collect::<String>());
    // It takes no empty file.
    "# words of inputs\n".to_owned() + &words.iter().map(quoted).collect::<String>()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A word of a dictionary, as libFuzzer takes it: nothing else may follow a backslash.
    fn unquoted(line: &str) -> Vec<u8> {
        let quoted = line.strip_prefix('"').and_then(|it| it.strip_suffix('"')).unwrap();
        let mut rest = quoted.bytes();
        let mut word = Vec::new();
        while let Some(byte) = rest.next() {
            assert!((b' '..=b'~').contains(&byte), "{line}");
            word.push(match byte {
                b'\\' => match rest.next() {
                    Some(escaped @ (b'"' | b'\\')) => escaped,
                    Some(b'x') => {
                        let digits = [rest.next().unwrap(), rest.next().unwrap()];
                        u8::from_str_radix(str::from_utf8(&digits).unwrap(), 16).unwrap()
                    }
                    other => panic!("{line}: {other:?} after a backslash"),
                },
                plain => plain,
            });
        }
        word
    }

    #[test]
    fn the_fuzzer_reads_the_words_of_every_target() {
        for Target { name, words, .. } in TARGETS {
            let text = dictionary(words);
            let read: Vec<Vec<u8>> = text.lines().skip(1).map(unquoted).collect();
            let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
            assert_eq!(read, words, "{name}");
        }
        assert_eq!(dictionary(&["\n\"'é"]), "# words of inputs\n\"\\x0a\\\"'\\xc3\\xa9\"\n");
    }
}
