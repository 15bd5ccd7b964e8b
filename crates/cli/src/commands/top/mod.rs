//! `rackbus top`: what the rack does now, live in the terminal.
//!
//! The control plane is asked for what nodes report, which they do every second while anything
//! changes, and nobody else, so that it is the same from any machine. [`rates`] makes rates of two
//! reports of a function, [`network`] and [`shared`] of two reports of a [host](hosts); [`view`] draws
//! them.

mod hosts;
mod network;
mod rates;
mod shared;
mod view;

use std::time::Duration;

use rackbus_control::ControlClient;
use rackbus_control::api::EventRecord;
use ratatui::crossterm::event::{self, KeyCode, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};
use rates::{Picture, Rates};
use view::{Screen, View};

/// Show what the rack does now: operations, rates and times of each function, what hosts share, what
/// the ports of the network exchange, and what happened last. On a terminal it goes on until q is pressed; otherwise, and with --once or
/// --json, it shows one interval and ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus top
  rackbus top --interval 5
  rackbus top --once
  rackbus top --json | jq '.functions[] | select(.p99_us > 100)'
  rackbus top --json | jq '.shared[] | {host, bytes, copied_bytes}'

Keys: 1 functions, 2 hosts, 3 events, 4 accelerators, 5 network, 6 shared memory, Tab the next; s sorts by another column, p pauses, q quits.")]
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
        let mut looks = Looks::of(common).await?;
        let interval = Duration::from_secs(self.interval);
        if self.once || output.is_json() || !std::io::IsTerminal::is_terminal(&std::io::stdout()) {
            let picture = one_interval(&mut looks, interval).await?;
            output.result(&picture, |o| view::print(&picture, o));
            return Ok(());
        }
        let first = looks.look().await?;
        let mut terminal = ratatui::try_init().map_err(|cause| {
            Failure::new(format!("the terminal cannot be drawn on: {cause}"), "use --once")
        })?;
        let ended = live(&mut looks, interval, first, &mut terminal).await;
        ratatui::restore();
        ended
    }
}

/// Who is asked, and what they said before.
struct Looks {
    client: ControlClient,
    rates: Rates,
}

impl Looks {
    async fn of(common: &Common) -> Result<Looks, Failure> {
        Ok(Looks { client: client(common).await?, rates: Rates::default() })
    }

    /// Asks the control plane once.
    async fn look(&mut self) -> Result<Picture, Failure> {
        let (devices, status) = (self.client.devices().await?, self.client.status().await?);
        Ok(self.rates.picture(devices, status))
    }
}

/// What happened in one interval, as far as nodes have reported.
async fn one_interval(looks: &mut Looks, interval: Duration) -> Result<Picture, Failure> {
    looks.look().await?;
    tokio::time::sleep(interval).await;
    // A node that has nothing new to tell reports less often than it is asked here.
    let deadline = tokio::time::Instant::now() + REPORTS;
    loop {
        let picture = looks.look().await?;
        if picture.is_complete() || tokio::time::Instant::now() >= deadline {
            return Ok(picture);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn last_events(client: &ControlClient) -> Result<Vec<EventRecord>, Failure> {
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
    looks: &mut Looks,
    interval: Duration,
    mut picture: Picture,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), Failure> {
    let mut user = User { keys: keys(), screen: Screen::default(), terminal };
    let mut next = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    next.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        if user.screen.view == View::Events && !user.screen.paused {
            let Some(events) = user.hear_during(last_events(&looks.client), &picture).await? else {
                return Ok(());
            };
            match events {
                Ok(events) => user.screen.events = events,
                Err(failure) => user.screen.trouble = Some(failure.error),
            }
        }
        user.draw(&picture)?;
        tokio::select! {
            pressed = user.keys.recv() => if user.screen.take(pressed) == Next::Quit {
                return Ok(());
            },
            _ = next.tick() => {
                if user.screen.paused {
                    continue;
                }
                // A control plane that is restarted is back soon; until then, what was last seen.
                match user.hear_during(looks.look(), &picture).await? {
                    Some(Ok(now)) => (picture, user.screen.trouble) = (now, None),
                    Some(Err(failure)) => user.screen.trouble = Some(failure.error),
                    None => return Ok(()),
                }
            }
        }
    }
}

/// Who looks, at what, and presses keys.
struct User<'a> {
    keys: mpsc::Receiver<Pressed>,
    screen: Screen,
    terminal: &'a mut ratatui::DefaultTerminal,
}

impl User<'_> {
    fn draw(&mut self, picture: &Picture) -> Result<(), Failure> {
        let drawn = self.terminal.draw(|frame| view::draw(picture, &self.screen, frame));
        drawn.map(drop).map_err(|cause| {
            Failure::new(format!("the terminal cannot be drawn on: {cause}"), "use --once")
        })
    }

    /// Waits for `asked`, which may take long when a host stands still, and does meanwhile what keys say. Nothing when
    /// the user has enough.
    async fn hear_during<T>(
        &mut self,
        asked: impl Future<Output = T>,
        picture: &Picture,
    ) -> Result<Option<T>, Failure> {
        let mut asked = std::pin::pin!(asked);
        loop {
            tokio::select! {
                answer = &mut asked => return Ok(Some(answer)),
                pressed = self.keys.recv() => {
                    if self.screen.take(pressed) == Next::Quit {
                        return Ok(None);
                    }
                    self.draw(picture)?;
                }
            }
        }
    }
}

/// What follows from what the user does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    GoOn,
    Quit,
}

enum Pressed {
    Quit,
    Key(KeyCode),
    Resized,
}

impl Screen {
    /// Does what a key says; nothing comes when the terminal is closed.
    fn take(&mut self, pressed: Option<Pressed>) -> Next {
        match pressed {
            Some(Pressed::Quit) | None => return Next::Quit,
            Some(Pressed::Key(key)) => self.press(key),
            Some(Pressed::Resized) => {}
        }
        Next::GoOn
    }
}

/// Keys that may wait while the control plane is asked. More stay with the terminal until there is a place.
const KEYS: usize = 64;

/// Keys as they are pressed, read by a thread of its own that ends with the process.
fn keys() -> mpsc::Receiver<Pressed> {
    let (sender, receiver) = mpsc::channel(KEYS);
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
            if sender.blocking_send(pressed).is_err() {
                return;
            }
        }
    });
    receiver
}
