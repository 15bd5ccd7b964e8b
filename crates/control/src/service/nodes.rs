//! What nodes say, and what is said to them.

use std::sync::atomic::Ordering;

use rackbus_lease::Message;
use tokio::sync::mpsc;

use super::known::RackState;
use super::writer::WriterRequest;
use super::{InventoryDevice, Service, WriterShared, problem};
use crate::api::{ApiError, Change, NodeMessages, NodeReport, device_of};
use crate::events::Draft;

/// Terms that records can have lost.
const MOST_LOST: u64 = 1_000_000;

impl Service {
    /// Messages from a host's node.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host, or the state cannot be stored.
    pub async fn receive(&self, host: &str, said: NodeMessages) -> Result<(), ApiError> {
        self.shared.check_host(host)?;
        let NodeMessages { mut messages, report } = said;
        for message in &mut messages {
            self.shared.bound(host, message)?;
        }
        tracing::debug!(host, ?messages, "received");
        let hear = |answer| {
            // What is new in a report is so once: it is compared with the one before when it is passed on.
            let events = report.map(|report| self.shared.note(host, report)).unwrap_or_default();
            WriterRequest::Heard { host: host.to_owned(), messages, events, answer }
        };
        self.writing.ask(hear).await
    }

    /// A node listens: what is said to it from now on. A later listener takes its place.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host.
    pub fn listen(&self, host: &str) -> Result<mpsc::Receiver<Message>, ApiError> {
        self.shared.check_host(host)?;
        let receiver = self.shared.known().listen(host);
        tracing::info!(host, "node connected");
        self.shared.tell_host(host);
        Ok(receiver)
    }

    /// The term in which nodes are told what they are told. `known`: the newest one that a node knows of; where that
    /// is later, the records are an older copy, and this continues in one that is later yet.
    ///
    /// # Errors
    /// [`ApiError`], when that cannot be stored, or is further ahead than records can have fallen behind: each such request
    /// would use up numbers, and a write to the store.
    pub async fn term(&self, known: u64) -> Result<u64, ApiError> {
        let term = self.shared.term.load(Ordering::Acquire);
        if known <= term {
            return Ok(term);
        }
        if known > term.saturating_add(MOST_LOST) {
            let error =
                format!("no control plane can have led in term {known}, this is term {term}");
            let remedy = "put the host's `control.term` right, and start its node again";
            return Err(problem("implausible_term", error, remedy));
        }
        self.writing.ask(|answer| WriterRequest::RaiseTerm { above: known, answer }).await
    }
}

impl WriterShared {
    /// A host was heard at `now`.
    pub(super) fn heard(&self, host: &str, now: u64, registers: bool) {
        self.known().heard.insert(host.to_owned(), now);
        if registers {
            self.tell_host(host);
        }
    }

    /// A node said how it is. Only what the rack has is kept. Returns what is new in it.
    pub(super) fn note(&self, host: &str, mut report: NodeReport) -> Vec<Draft> {
        let inventory = self.inventory();
        let own: Vec<&InventoryDevice> = inventory.devices.of_host(host).collect();
        let counted_ms = report.counted_ms;
        let functions = report.devices.values_mut().chain(report.fronts.values_mut());
        functions.for_each(|function| function.counted_ms = counted_ms);
        report.devices.retain(|name, _| own.iter().any(|own| own.function.device == *name));
        let has = |device: &String| own.iter().any(|own| device_of(&own.function.device) == device);
        report.accelerators.retain(|name, room| has(name) && room.is_bounded());
        report.bound_names();
        report.unused_ntbs.retain(|peer, _| inventory.hosts.contains(peer));
        let mut known = self.known();
        report.fronts.retain(|name, _| known.borrows(host, name));
        report.peers.retain(|name, _| known.borrows(host, name));
        let restarts = report.restarts_in_place;
        let pause_us = report.restart_pause_us;
        let before = known.reports.insert(host.to_owned(), report);
        let mut drafts = Vec::new();
        if before.as_ref().is_some_and(|before| before.restarts_in_place < restarts) {
            drafts.push(Draft::of_restart_in_place(host, pause_us));
        }
        let first = before.is_none();
        let before = before.unwrap_or_default();
        let RackState { reports, told_ntbs, log, .. } = &mut *known;
        if let Some(now) = reports.get(host) {
            let told = told_ntbs.entry(host.to_owned()).or_default();
            let bounds = Draft::of_bounds(host, &before, now).into_iter();
            let of_host = bounds.chain(Draft::of_ntbs(host, told, now));
            drafts.extend(of_host.filter(|it| !first || !log.says(it)));
        }
        for device in own {
            let name = &device.function.device;
            let of = |report: &NodeReport| report.devices.get(name).cloned().unwrap_or_default();
            let (before, now) = (of(&before), known.reports.get(host).map(of).unwrap_or_default());
            if before.trouble != now.trouble {
                let _ = self.changes.send(Change::Device(Box::new(self.device(&known, device))));
            }
            let function = device.function.to_string();
            let news = Draft::of_report(host, &function, &before, &now).into_iter();
            // After a restart of the control plane everything in a report is new to it.
            let is_said = |draft: &Draft| draft.is_of_lease() && known.log.says(draft);
            drafts.extend(news.filter(|draft| !first || !is_said(draft)));
        }
        for (function, now) in known.reports.get(host).iter().flat_map(|report| &report.fronts) {
            let before = before.fronts.get(function).cloned().unwrap_or_default();
            drafts.extend(Draft::of_report(host, function, &before, now));
        }
        drafts.retain(|draft| draft.is_news(|lease| known.is_turn(lease)));
        for (function, now) in known.reports.get(host).iter().flat_map(|report| &report.peers) {
            let before = before.peers.get(function).cloned().unwrap_or_default();
            drafts.extend(Draft::of_peers(host, function, &before, now));
        }
        drafts
    }
}
