//! `rackbus share`: takes turns on a function with others.

mod follow;

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use rackbus_control::api::Isolation;
use rackbus_control::shares::{Share, ShareSpec, ShareState};
use rackbus_node::borrower::functions_folder;
use rackbus_node::borrower::turns::turn_path;

use crate::Common;
use crate::commands::borrow::IsolationName;
use crate::commands::client;
use crate::contexts;
use crate::output::{Cell, Failure, Output, Tone};
use crate::paths::find_run_dir;

/// Take turns on a function with others: each has it for a slice, unattended. Who has it is asked to release it first: a
/// VM's guest unplugs it, a program is told and has some time. Then the next one gets it. Who released it late has a shorter
/// turn next; who is alone keeps it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus share join alpha/nvme0 --for beta --vm vm1          plugged into vm1 in each of its turns
  rackbus share join alpha/nvme0 --for gamma --slice 1min     prints where its socket appears in each turn
  rackbus share run alpha/nvme0 --for beta -- ./work          started in each turn, ended by SIGTERM after it
  rackbus share follow 5 --json | jq -r .state                turn, asked, waiting, ... as it happens
  rackbus share yield 5                                       done early: the next one's turn begins
  rackbus share leave 5")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List who takes turns, on what, and whose turn it is
    List,
    /// Take turns on a function from now on, until `leave`
    Join(JoinArgs),
    /// Take no more turns
    Leave(NumberArgs),
    /// Give the turn back early, and go on taking turns
    Yield(NumberArgs),
    /// Tell when a share's turn begins, when it is asked to release the function, and when it is over
    Follow(NumberArgs),
    /// Run a program in each turn, until it has done its work
    Run(RunArgs),
}

/// What is asked for.
#[derive(Debug, clap::Args)]
struct JoinArgs {
    /// The function, as HOST/DEVICE
    function: String,
    /// The host that shall have it in turns
    #[arg(long = "for", value_name = "HOST")]
    host: String,
    /// The VM of that host into which it is plugged in each turn; without, it is for a program
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    #[command(flatten)]
    turns: TurnArgs,
}

/// How the turns are.
#[derive(Debug, clap::Args)]
struct TurnArgs {
    /// How long a turn of weight 1 is; the same for all who share the function [default: as the others have it, or 30s]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    slice: Option<Duration>,
    /// How long a program may take to release the function [default: 5s]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    grace: Option<Duration>,
    /// How many slices a turn has, from 1 to 100
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    weight: u32,
    /// `strict`: the lender gets no memory of the borrower's
    #[arg(long, value_enum, default_value_t = IsolationName::Shared, value_name = "HOW")]
    isolation: IsolationName,
    /// The program that it is for: functions of one group reach each other's memory by DMA, except with strict isolation
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// The service level that its lender is to promise in each turn
    #[arg(long, value_name = "LEVEL")]
    level: Option<String>,
}

/// `rackbus share leave`, `yield` and `follow`.
#[derive(Debug, clap::Args)]
struct NumberArgs {
    /// The share, by the number that `rackbus share` printed
    share: u64,
}

/// Arguments of `rackbus share run`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The program finds the function's vfio-user socket in RACKBUS_SOCKET. At the end of the turn it gets SIGTERM;
it is to close the socket within --grace. When it ends by itself without an error, its work is done, and no more
turns are taken."
)]
struct RunArgs {
    /// The function, as HOST/DEVICE
    function: String,
    /// The host that shall have it in turns
    #[arg(long = "for", value_name = "HOST")]
    host: String,
    #[command(flatten)]
    turns: TurnArgs,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl TurnArgs {
    fn spec(&self, function: &str, host: &str) -> ShareSpec {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        ShareSpec {
            slice_ms: self.slice.map(millis),
            grace_ms: self.grace.map(millis),
            weight: Some(self.weight),
            isolation: Isolation::from(self.isolation),
            group: self.group.clone(),
            level: self.level.clone(),
            ..ShareSpec::new(function, host)
        }
    }
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common).await?;
        match &self.command {
            Command::List => {
                let shares = client.shares().await?;
                output.result(&shares, |o| o.table(&HEAD, shares.iter().map(row).collect()));
            }
            Command::Join(args) => {
                let spec = args.turns.spec(&args.function, &args.host);
                let share = client.join_share(&ShareSpec { vm: args.vm.clone(), ..spec }).await?;
                // By a context, the borrower is on another machine.
                let run_dir = match contexts::chosen(common)? {
                    Some(_) => None,
                    None => Some(find_run_dir(common)?),
                };
                output.result(&share, |o| joined(&share, run_dir.as_deref(), o));
            }
            Command::Leave(args) => {
                let share = client.leave_share(args.share).await?;
                output.result(&share, |o| {
                    let Share { share, function, borrower, turns, .. } = &share;
                    o.line(&format!(
                        "share {share}: {borrower} takes no more turns on {function}; it had {turns}"
                    ));
                });
            }
            Command::Yield(args) => {
                let share = client.give_turn_back(args.share).await?;
                output.result(&share, |o| o.line(&format!("share {}: its turn ends", share.share)));
            }
            Command::Follow(args) => follow::follow(&client, args.share, output).await?,
            Command::Run(args) => {
                let spec = args.turns.spec(&args.function, &args.host);
                follow::run(&client, &spec, &args.command, output).await?;
            }
        }
        Ok(())
    }
}

fn joined(share: &Share, run_dir: Option<&Path>, output: &Output) {
    let Share { share: number, function, borrower, slice_ms, weight, .. } = share;
    let turn = slice_ms * u64::from(*weight);
    output.line(&format!(
        "share {number}: {borrower} takes turns of {:.1} s on {function}",
        turn as f64 / 1e3
    ));
    match (&share.vm, run_dir) {
        (Some(vm), _) => output.line(&format!("plugged into {vm} in each of them")),
        (None, None) => output.line(&format!(
            "on that machine, `rackbus share follow {number}` says its socket when it is its turn"
        )),
        (None, Some(run_dir)) => {
            let path = turn_path(&functions_folder(run_dir, borrower), *number);
            output.line(&format!("socket {}, while it is its turn", path.display()));
        }
    }
}

const HEAD: [&str; 9] =
    ["share", "function", "for", "state", "ahead", "turn", "turns", "held", "hand-over"];

fn row(share: &Share) -> Vec<Cell> {
    let (state, tone) = state(share.state);
    let seconds = |ms: f64| format!("{:.1} s", ms / 1e3);
    let handover = match share.handovers {
        0 => String::new(),
        count => format!("{:.0} ms", share.handover_ms as f64 / count as f64),
    };
    let user = share.vm.as_ref().map(|vm| format!(" VM {vm}")).unwrap_or_default();
    vec![
        share.share.to_string().into(),
        share.function.clone().into(),
        format!("{}{user}", share.borrower).into(),
        Cell(state.into(), tone),
        share.ahead.map(|ahead| ahead.to_string()).unwrap_or_default().into(),
        seconds(share.allowance_ms as f64).into(),
        share.turns.to_string().into(),
        seconds(share.held_ms as f64).into(),
        handover.into(),
    ]
}

fn state(state: ShareState) -> (&'static str, Tone) {
    match state {
        ShareState::Waiting => ("waiting", Tone::Plain),
        ShareState::Coming => ("coming", Tone::Busy),
        ShareState::Turn => ("turn", Tone::Good),
        ShareState::Asked => ("asked", Tone::Busy),
    }
}
