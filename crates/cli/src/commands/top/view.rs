//! What `rackbus top` draws: a view for each part of the rack.

use rackbus_control::api::EventRecord;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell as ScreenCell, Row as ScreenRow, Table};

use super::rates::{Picture, RateRow};
use super::{network, shared};
use crate::commands::{devices, events, status};
use crate::output::{Cell, Output, Tone, ago, duration};

/// A part of the rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum View {
    /// Rates, times and failures of each function.
    #[default]
    Functions,
    /// How hosts are, and what they share.
    Hosts,
    /// The events of the rack, newest first.
    Events,
    /// What accelerators' users get of what they were promised.
    Accelerators,
    /// What the ports of the network exchange.
    Network,
    /// What hosts' processes share, and what their copy channels do.
    SharedMemory,
}

/// What functions are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sort {
    /// The order of the rack file, which is that of their names.
    #[default]
    Name,
    /// Operations a second, most first.
    Operations,
    /// Bytes a second, most first.
    Bytes,
    /// The 99th percentile of times, longest first.
    Time,
}

/// What the user looks at.
#[derive(Debug, Default)]
pub struct Screen {
    /// The part of the rack that is drawn.
    pub view: View,
    /// The order of the functions.
    pub sort: Sort,
    /// Nothing changes until the user goes on.
    pub paused: bool,
    /// Why what is shown is old.
    pub trouble: Option<String>,
    /// What happened last, newest first.
    pub events: Vec<EventRecord>,
}

impl Screen {
    /// A key was pressed.
    pub fn press(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('1') => self.view = View::Functions,
            KeyCode::Char('2') => self.view = View::Hosts,
            KeyCode::Char('3') => self.view = View::Events,
            KeyCode::Char('4') => self.view = View::Accelerators,
            KeyCode::Char('5') => self.view = View::Network,
            KeyCode::Char('6') => self.view = View::SharedMemory,
            KeyCode::Tab => {
                self.view = match self.view {
                    View::Functions => View::Hosts,
                    View::Hosts => View::Events,
                    View::Events => View::Accelerators,
                    View::Accelerators => View::Network,
                    View::Network => View::SharedMemory,
                    View::SharedMemory => View::Functions,
                }
            }
            KeyCode::Char('s') => {
                self.sort = match self.sort {
                    Sort::Name => Sort::Operations,
                    Sort::Operations => Sort::Bytes,
                    Sort::Bytes => Sort::Time,
                    Sort::Time => Sort::Name,
                }
            }
            KeyCode::Char('p') => self.paused = !self.paused,
            _ => {}
        }
    }
}

const FUNCTIONS: [&str; 13] = [
    "function",
    "state",
    "holder",
    "reads/s",
    "writes/s",
    "others/s",
    "failed/s",
    "read B/s",
    "written B/s",
    "p50",
    "p99",
    "sleeps/s",
    "DMA refused",
];
const ACCELERATORS: [&str; 13] = [
    "function",
    "holder",
    "level",
    "op/s",
    "in B/s",
    "out B/s",
    "engines",
    "p50",
    "p99",
    "kept",
    "violations",
    "held back",
    "split/s",
];
const HOSTS: [&str; 6] = ["host", "node", "offers", "borrows", "shares", "conversations"];

/// Draws what the user looks at.
pub fn draw(picture: &Picture, screen: &Screen, frame: &mut Frame<'_>) {
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(2), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(heading(picture, screen), head);
    let table = match screen.view {
        View::Functions => table(&FUNCTIONS, functions(picture, screen.sort)),
        View::Hosts => table(&HOSTS, hosts(picture)),
        View::Accelerators => table(&ACCELERATORS, accelerators(picture, screen.sort)),
        View::Network => table(&network::HEAD, network_rows(picture)),
        View::SharedMemory => table(&shared::HEAD, shared_rows(picture)),
        View::Events => table(&events::HEAD, screen.events.iter().map(events::row).collect()),
    };
    frame.render_widget(table, body);
    let keys = Line::from(
        "1 functions  2 hosts  3 events  4 accelerators  5 network  6 shared memory  s sort  p pause  q quit",
    );
    frame.render_widget(keys.style(Style::new().add_modifier(Modifier::DIM)), foot);
}

/// The same for a file or a pipe: functions, accelerators, the network and shared memory where there are any, then hosts.
pub fn print(picture: &Picture, output: &Output) {
    output.table(&FUNCTIONS, functions(picture, Sort::Name));
    let accelerators = accelerators(picture, Sort::Name);
    if !accelerators.is_empty() {
        output.line("");
        output.table(&ACCELERATORS, accelerators);
    }
    if !picture.network.is_empty() {
        output.line("");
        output.table(&network::HEAD, network_rows(picture));
    }
    if shared::is_used(&picture.shared) {
        output.line("");
        output.table(&shared::HEAD, shared_rows(picture));
    }
    output.line("");
    output.table(&HOSTS, hosts(picture));
}

fn heading(picture: &Picture, screen: &Screen) -> Line<'static> {
    let status = &picture.status;
    let reads: f64 = picture.functions.iter().map(|row| row.reads).sum();
    let writes: f64 = picture.functions.iter().map(|row| row.writes).sum();
    let text = format!(
        "rack {}, up {}: {} leases, {} reads/s, {} writes/s",
        status.rack,
        ago(status.uptime_ms),
        status.live_leases,
        number(reads),
        number(writes),
    );
    let mut spans = vec![Span::styled(text, Style::new().add_modifier(Modifier::BOLD))];
    if screen.paused {
        spans.push(Span::styled("  paused", Style::new().fg(Color::Yellow)));
    }
    if let Some(trouble) = &screen.trouble {
        spans.push(Span::styled(format!("  {trouble}"), Style::new().fg(Color::Red)));
    }
    Line::from(spans)
}

/// A table whose columns are as wide as their contents.
fn table(head: &[&'static str], rows: Vec<Vec<Cell>>) -> Table<'static> {
    let mut widths: Vec<usize> = head.iter().map(|name| name.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.0.chars().count());
        }
    }
    let constraints = widths.iter().map(|width| Constraint::Length(*width as u16));
    let head = ScreenRow::new(head.iter().map(|name| name.to_uppercase()))
        .style(Style::new().add_modifier(Modifier::BOLD));
    let rows = rows.into_iter().map(|row| {
        ScreenRow::new(row.into_iter().map(|Cell(text, tone)| {
            let style = match tone {
                Tone::Plain => Style::new(),
                Tone::Good => Style::new().fg(Color::Green),
                Tone::Busy => Style::new().fg(Color::Yellow),
                Tone::Bad => Style::new().fg(Color::Red),
            };
            ScreenCell::from(text).style(style)
        }))
    });
    Table::new(rows, constraints).header(head).column_spacing(2)
}

fn functions(picture: &Picture, sort: Sort) -> Vec<Vec<Cell>> {
    sorted(picture, sort).into_iter().map(function).collect()
}

/// The functions that have engines, whatever their class.
fn accelerators(picture: &Picture, sort: Sort) -> Vec<Vec<Cell>> {
    let rows = sorted(picture, sort).into_iter();
    rows.filter(|row| row.has_engines).map(accelerator).collect()
}

fn accelerator(row: &RateRow) -> Vec<Cell> {
    let shaped = |name: &str| row.shaping.get(name).copied().unwrap_or(0.0);
    let rate = |value: f64| match row.seconds {
        Some(_) => number(value).into(),
        None => Cell::from(""),
    };
    // Nanoseconds of each second.
    let part = |value: f64| format!("{:.0} %", value / 1e7);
    let time = |us: Option<f64>| us.map(duration).unwrap_or_default().into();
    let tone = if row.violations > 0 { Tone::Bad } else { Tone::Plain };
    let kept = row.kept.map(|kept| format!("{:.1} %", kept * 100.0)).unwrap_or_default();
    vec![
        row.function.clone().into(),
        devices::holder(row.holder.as_deref(), row.turns.as_ref()).into(),
        row.level.clone().unwrap_or_default().into(),
        rate(row.others),
        rate(shaped("ingress_bytes")),
        rate(shaped("egress_bytes")),
        part(shaped("engine_ns")).into(),
        time(row.p50_us),
        time(row.p99_us),
        Cell(kept, if row.kept.is_some_and(|kept| kept < 0.99) { Tone::Bad } else { Tone::Plain }),
        Cell(row.violations.to_string(), tone),
        part(shaped("throttled_ns")).into(),
        rate(shaped("split")),
    ]
}

fn sorted(picture: &Picture, sort: Sort) -> Vec<&RateRow> {
    let mut rows: Vec<&RateRow> = picture.functions.iter().collect();
    let key = |row: &RateRow| match sort {
        Sort::Name => 0.0,
        Sort::Operations => row.reads + row.writes + row.others,
        Sort::Bytes => row.read_bytes + row.written_bytes,
        Sort::Time => row.p99_us.unwrap_or(0.0),
    };
    // Stable: those that do the same stay in the order of their names.
    rows.sort_by(|a, b| key(b).total_cmp(&key(a)));
    rows
}

fn function(row: &RateRow) -> Vec<Cell> {
    let (state, tone) = match &row.trouble {
        Some(trouble) => (trouble.as_str(), Tone::Bad),
        None => devices::state(row.state),
    };
    let rate = |value: f64| match row.seconds {
        Some(_) => number(value).into(),
        None => Cell::from(""),
    };
    let time = |us: Option<f64>| us.map(duration).unwrap_or_default().into();
    let failed = if row.failed > 0.0 { Tone::Bad } else { Tone::Plain };
    let refused = if row.dma_refused > 0 { Tone::Bad } else { Tone::Plain };
    vec![
        row.function.clone().into(),
        Cell(state.into(), tone),
        devices::holder(row.holder.as_deref(), row.turns.as_ref()).into(),
        rate(row.reads),
        rate(row.writes),
        rate(row.others),
        Cell(rate(row.failed).0, failed),
        rate(row.read_bytes),
        rate(row.written_bytes),
        time(row.p50_us),
        time(row.p99_us),
        rate(row.sleeps),
        Cell(row.dma_refused.to_string(), refused),
    ]
}

fn hosts(picture: &Picture) -> Vec<Vec<Cell>> {
    let hosts = picture.status.hosts.iter().map(|host| {
        let (state, tone) = status::node_state(host.state);
        let list = |counts: &std::collections::BTreeMap<String, u64>| {
            let there = counts.iter().filter(|(_, count)| **count > 0);
            there.map(|(what, count)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
        };
        vec![
            host.host.clone().into(),
            Cell(state.into(), tone),
            host.offers.to_string().into(),
            host.borrows.to_string().into(),
            list(&host.shared_memory).into(),
            list(&host.conversations).into(),
        ]
    });
    hosts.collect()
}

fn network_rows(picture: &Picture) -> Vec<Vec<Cell>> {
    picture.network.iter().map(network::cells).collect()
}

fn shared_rows(picture: &Picture) -> Vec<Vec<Cell>> {
    picture.shared.iter().map(shared::cells).collect()
}

/// A number with at most four digits and its power of a thousand: `812`, `45.1k`, `3.21M`.
pub fn number(value: f64) -> String {
    let mut scaled = value;
    for unit in ["", "k", "M", "G", "T"] {
        if scaled < 999.5 || unit == "T" {
            let places = match scaled {
                _ if unit.is_empty() => usize::from(scaled > 0.0 && scaled < 9.95),
                v if v < 9.995 => 2,
                v if v < 99.95 => 1,
                _ => 0,
            };
            return format!("{scaled:.places$}{unit}");
        }
        scaled /= 1000.0;
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use rackbus_control::api::{Device, DeviceReport, EventKind, HostStatus, OperationReport};
    use rackbus_control::usage::LeaseReport;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::super::network::tests::sent;
    use super::super::rates::Rates;
    use super::super::rates::tests::{drive, status};
    use super::super::shared::tests::copied;
    use super::*;

    fn picture() -> Picture {
        // Of one report all that nodes say of a host.
        let hosts = |counted_ms, count| {
            let HostStatus { network, .. } = sent(counted_ms, count);
            json!([HostStatus { network, ..copied(counted_ms, count) }])
        };
        let mut rates = Rates::default();
        rates.picture(vec![drive(0, 0)], status(hosts(1000, 0)));
        rates.picture(vec![drive(1000, 45_100)], status(hosts(2000, 50_000)))
    }

    /// What the terminal shows, a line each.
    fn shown(screen: &Screen) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(140, 8)).unwrap();
        terminal.draw(|frame| draw(&picture(), screen, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(140);
        lines.map(|line| line.iter().map(|cell| cell.symbol()).collect()).collect()
    }

    #[test]
    fn each_view_shows_its_part() {
        let mut screen = Screen::default();
        let lines = shown(&screen);
        assert!(lines[0].contains("rack lab, up 61 s: 1 leases, 45.1k reads/s"), "{lines:#?}");
        let words: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(words[..4], ["alpha/nvme0", "lent", "beta", "45.1k"], "{lines:#?}");
        assert!(words.contains(&"185M"), "{lines:#?}");
        screen.press(KeyCode::Tab);
        let lines = shown(&screen);
        assert!(lines[3].contains("2 segments") && !lines[3].contains("moves"), "{lines:#?}");
        screen.press(KeyCode::Char('5'));
        let lines = shown(&screen);
        let words: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(words[..4], ["alpha", "beta", "50.0k", "50.0M"], "{lines:#?}");
        screen.press(KeyCode::Tab);
        let lines = shown(&screen);
        let words: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(words[..5], ["alpha", "3", "2,", "6", "MiB"], "{lines:#?}");
        assert_eq!(words[words.len() - 3..], ["50.0k", "205M", "3"], "{lines:#?}");
        screen.press(KeyCode::Char('3'));
        screen.press(KeyCode::Char('p'));
        screen.events = vec![EventRecord {
            id: 1,
            at_ms: 1_700_000_000_000,
            kind: EventKind::Lease,
            host: None,
            function: None,
            lease: Some(1),
            epoch: None,
            by: None,
            text: "alpha/nvme0 is lent to beta".into(),
        }];
        let lines = shown(&screen);
        assert!(lines[0].contains("paused") && lines[3].contains("is lent to beta"), "{lines:#?}");
    }

    /// An accelerator's function that has done so many operations for its lease by this time.
    fn accelerator(counted_ms: u64, done: u64) -> Device {
        let counts = OperationReport { done, latency: vec![0, 0, 0, done], ..Default::default() };
        let shaped = [
            ("ingress_bytes", done * 4096),
            ("engine_ns", done * 5000),
            ("throttled_ns", done * 1000),
            ("promised", done * 1000),
            ("delivered", done * 985),
            ("violations", done / 50_000),
        ];
        let shaping: std::collections::BTreeMap<String, u64> =
            shaped.map(|(name, count)| (name.to_owned(), count)).into();
        let lease = LeaseReport { lease: 1, shaping: shaping.clone(), ..LeaseReport::default() };
        Device {
            function: "alpha/accel0.vf1".into(),
            kind: "coprocessor".into(),
            capabilities: Some(vec!["engines".into()]),
            report: Some(Box::new(DeviceReport {
                counted_ms,
                shaping,
                level: Some("zstd 1 Gbit/s".into()),
                lease: Some(lease),
                operations: [("zstd".to_owned(), counts)].into(),
                ..DeviceReport::default()
            })),
            ..drive(0, 0)
        }
    }

    #[test]
    fn accelerators_show_what_was_kept() {
        let mut rates = Rates::default();
        rates.picture(vec![drive(0, 0), accelerator(0, 0)], status(json!([])));
        let picture =
            rates.picture(vec![drive(0, 0), accelerator(1000, 100_000)], status(json!([])));
        let rows = accelerators(&picture, Sort::Name);
        let texts: Vec<&str> = rows[0].iter().map(|cell| cell.0.as_str()).collect();
        assert_eq!(rows.len(), 1);
        assert_eq!(
            texts[..7],
            ["alpha/accel0.vf1", "beta", "zstd 1 Gbit/s", "100k", "410M", "0", "50 %"]
        );
        assert_eq!(texts[9..12], ["98.5 %", "2", "10 %"], "{texts:?}");
        assert!(texts[7].ends_with("ns") || texts[7].ends_with("us"), "{texts:?}");
    }

    #[test]
    fn numbers_have_their_power_of_a_thousand() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.2"),
            (42.0, "42"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (45_100.0, "45.1k"),
            (1_234_567.0, "1.23M"),
            (5e15, "5000T"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
