//! `rackbus top`: what the rack does now, live in the terminal.
//!
//! The control plane is asked for what nodes report, which they do every second while anything
//! changes; [`rates`] makes rates of two reports, [`view`] draws them.

mod rates;
mod view;

use std::time::Duration;

use rackbus_control::Client;
use rackbus_control::api::Event;
use ratatui::crossterm::event::{self, KeyCode, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};
use rates::{Picture, Rates};
use view::{Screen, View};

/// Show what the rack does now: operations, rates and times of each function, what hosts share, and
/// what happened last. On a terminal it goes on until q is pressed; otherwise, and with --once or
/// --json, it shows one interval and ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus top
  rackbus top --interval 5
  rackbus top --once
  rackbus top --json | jq '.functions[] | select(.p99_us > 100)'

Keys: 1 functions, 2 hosts, 3 events, 4 accelerators, Tab the next; s sorts by another column, p pauses, q quits.")]
pub struct Args {
    /// Seconds from one picture to the next.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Show one interval and end.
    #[arg(long)]
    once: bool,
}

/// How many events there is room for on the largest terminals.
const EVENTS: usize = 200;
/// How long nodes may take to say anew how they are: their longest interval, and some time more.
const REPORTS: Duration = Duration::from_secs(4);

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common)?;
        let interval = Duration::from_secs(self.interval);
        if self.once || output.is_json() || !std::io::IsTerminal::is_terminal(&std::io::stdout()) {
            let picture = one_interval(&client, interval).await?;
            output.result(&picture, |o| view::print(&picture, o));
            return Ok(());
        }
        let mut rates = Rates::default();
        let first = look(&client, &mut rates).await?;
        let mut terminal = ratatui::try_init().map_err(|cause| {
            Failure::new(format!("the terminal cannot be drawn on: {cause}"), "use --once")
        })?;
        let ended = live(&client, interval, &mut rates, first, &mut terminal).await;
        ratatui::restore();
        ended
    }
}

/// Asks the control plane once.
async fn look(client: &Client, rates: &mut Rates) -> Result<Picture, Failure> {
    let (devices, status) = (client.devices().await?, client.status().await?);
    Ok(rates.picture(devices, status))
}

/// What happened in one interval, as far as nodes have reported.
async fn one_interval(client: &Client, interval: Duration) -> Result<Picture, Failure> {
    let mut rates = Rates::default();
    look(client, &mut rates).await?;
    tokio::time::sleep(interval).await;
    // A node that has nothing new to tell reports less often than it is asked here.
    let deadline = tokio::time::Instant::now() + REPORTS;
    loop {
        let picture = look(client, &mut rates).await?;
        if picture.is_complete() || tokio::time::Instant::now() >= deadline {
            return Ok(picture);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn last_events(client: &Client) -> Result<Vec<Event>, Failure> {
    let mut lines = client.events(None, Some(EVENTS), false).await?;
    let mut events = Vec::new();
    while let Some(event) = lines.next().await {
        events.push(event);
    }
    events.reverse();
    Ok(events)
}

/// Draws until the user has enough.
async fn live(
    client: &Client,
    interval: Duration,
    rates: &mut Rates,
    mut picture: Picture,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), Failure> {
    let mut keys = keys();
    let mut screen = Screen::default();
    let mut next = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    next.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        if screen.view == View::Events && !screen.paused {
            screen.events = last_events(client).await?;
        }
        let drawn = terminal.draw(|frame| view::draw(&picture, &screen, frame));
        drawn.map_err(|cause| {
            Failure::new(format!("the terminal cannot be drawn on: {cause}"), "use --once")
        })?;
        tokio::select! {
            pressed = keys.recv() => match pressed {
                Some(Pressed::Quit) | None => return Ok(()),
                Some(Pressed::Key(key)) => screen.press(key),
                Some(Pressed::Resized) => {}
            },
            _ = next.tick() => {
                if !screen.paused {
                    // A control plane that is restarted is back soon; until then, what was last seen.
                    match look(client, rates).await {
                        Ok(now) => (picture, screen.trouble) = (now, None),
                        Err(failure) => screen.trouble = Some(failure.error),
                    }
                }
            }
        }
    }
}

enum Pressed {
    Quit,
    Key(KeyCode),
    Resized,
}

/// Keys as they are pressed, read by a thread of its own that ends with the process.
fn keys() -> mpsc::UnboundedReceiver<Pressed> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            let pressed = match event {
                event::Event::Key(key) if key.kind != KeyEventKind::Press => continue,
                event::Event::Key(key) => match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => Pressed::Quit,
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                        Pressed::Quit
                    }
                    code => Pressed::Key(code),
                },
                event::Event::Resize(..) => Pressed::Resized,
                _ => continue,
            };
            if sender.send(pressed).is_err() {
                return;
            }
        }
    });
    receiver
}
