//! What a guest's agent answers to the commands that a host runs in it: lines of replies, or anything.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rackbus_vm::agent::{CommandOutput, GuestAgent};

/// Bytes of an input that stand for the numbers of the two commands that run.
const NUMBERS: [u8; 2] = [0xf0, 0xf1];
/// Words that replies of a guest's agent have in them.
pub const WORDS: &[&str] = &[" 0 - -\n", " 124 ", " -1 ", "aGkK", "====", " - ", "\n"];
const LIMIT: Duration = Duration::from_secs(60);

/// A VM's folder with the socket of an agent.
struct Folder(PathBuf);

impl Folder {
    fn make() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rackbus-fuzz-agent-{}-{number}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&folder.0).expect("nobody else has this name");
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is in the system's folder for such files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A guest says what `data` holds, and goes.
pub fn run(data: &[u8]) {
    let folder = Folder::make();
    let listener = UnixListener::bind(folder.0.join("agent.sock")).expect("the folder is new");
    let agent = GuestAgent::of_vm(&folder.0).expect("it listens");
    let (guest, _) = listener.accept().expect("somebody has connected");
    let commands = ["one", "other"].map(|command| agent.start(command, LIMIT).expect("it is sent"));
    let numbers = asked(&guest);
    let said = spelled(data, &numbers);
    // Who reads replies reads all of them.
    (&guest).write_all(&said).expect("the agent reads");
    guest.shutdown(Shutdown::Write).expect("it is open");
    for (command, number) in commands.into_iter().zip(&numbers) {
        check(&said, number, command.wait().ok());
    }
}

/// The numbers of the commands that the guest was asked to run.
fn asked(guest: &UnixStream) -> [String; 2] {
    let mut lines = BufReader::new(guest).lines();
    [(); 2].map(|()| {
        let line = lines.next().expect("a command comes").expect("it comes whole");
        line.split(' ').next().expect("it has a number").to_owned()
    })
}

fn spelled(data: &[u8], numbers: &[String; 2]) -> Vec<u8> {
    let spell = |byte: &u8| match NUMBERS.iter().position(|number| number == byte) {
        Some(number) => numbers[number].clone().into_bytes(),
        None => vec![*byte],
    };
    data.iter().flat_map(spell).collect()
}

/// An output is that of a line which says so of this command, and one that is said as it should be is not missed.
fn check(said: &[u8], number: &str, output: Option<CommandOutput>) {
    let lines: Vec<&str> = said
        .split(|byte| *byte == b'\n')
        .filter_map(|line| std::str::from_utf8(line).ok())
        .collect();
    let Some(output) = output else {
        let plain = format!("{number} 0 - -");
        assert!(!lines.contains(&&*plain), "a reply was not heard");
        return;
    };
    let encodes = |field: Option<&str>, bytes: &[u8]| match field {
        Some("-") => bytes.is_empty(),
        field => field == Some(&*BASE64.encode(bytes)),
    };
    let says = |line: &&str| {
        let mut fields = line.split_ascii_whitespace();
        // Numbers may have zeros or a sign before them.
        fields.next().and_then(|field| field.parse().ok()) == number.parse::<u64>().ok()
            && fields.next().and_then(|field| field.parse().ok()) == Some(output.status)
            && encodes(fields.next(), &output.stdout)
            && encodes(fields.next(), &output.stderr)
            && fields.next().is_none()
    };
    assert!(lines.iter().any(says), "no line says {output:?} of command {number}");
}

/// Replies to both commands, to none, and none.
pub fn seeds() -> Vec<Vec<u8>> {
    let [one, other] = NUMBERS;
    let reply = |number: u8, text: &str| [&[number], text.as_bytes(), b"\n"].concat();
    vec![
        [reply(other, " 0 aGkK -"), reply(one, " 1 - aGkK")].concat(),
        [reply(one, " 124 - -"), reply(one, " 0 - -"), reply(b'7', " 0 - -")].concat(),
        [b"7 0 ! -\n".to_vec(), reply(other, " 0 - -")].concat(),
        reply(one, " 0 aGk -"),
        b"\x00\xff".to_vec(),
    ]
}
