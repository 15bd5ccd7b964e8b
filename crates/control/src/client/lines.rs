//! Answers that are streams: one JSON value a line.

use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

/// A stream of JSON values, one a line.
#[derive(Debug)]
pub struct JsonLines<T> {
    body: Incoming,
    buffer: Vec<u8>,
    broken: bool,
    kind: std::marker::PhantomData<T>,
}

impl<T: DeserializeOwned> JsonLines<T> {
    pub(super) fn new(response: Response<Incoming>) -> Self {
        let (buffer, kind) = (Vec::new(), std::marker::PhantomData);
        JsonLines { body: response.into_body(), buffer, broken: false, kind }
    }

    /// Whether the stream broke off before its end: there would have been more.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The next value; `None` when the stream has ended. A line that makes no sense is passed
    /// over (a newer control plane may say more than is known here).
    pub async fn next(&mut self) -> Option<T> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(value) => return Some(value),
                    Err(_) if line.len() <= 1 => continue,
                    Err(cause) => {
                        tracing::debug!(%cause, "a line of the stream makes no sense");
                        continue;
                    }
                }
            }
            match self.body.frame().await? {
                Ok(frame) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Err(cause) => {
                    tracing::debug!(%cause, "a stream broke off");
                    self.broken = true;
                    return None;
                }
            }
        }
    }
}
