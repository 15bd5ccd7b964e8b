//! A function's rate in one direction.

use rackbus_qos::bucket::Bucket;

/// How much may go now.
#[derive(Debug, Clone)]
pub struct Shaper(Option<Bucket>);

impl Shaper {
    /// Bytes per second, and in one burst; `None` for no bound.
    pub fn new(rate: Option<(u64, u64)>) -> Shaper {
        Shaper(rate.map(|(rate, burst)| Bucket::full(rate, burst, 0)))
    }

    /// Whether a frame may go at `now` (nanoseconds).
    ///
    /// # Errors
    /// When it may, otherwise.
    #[inline]
    pub fn ready(&mut self, now: u64) -> Result<(), u64> {
        match &mut self.0 {
            None => Ok(()),
            Some(bucket) => match bucket.ready(now) {
                true => Ok(()),
                false => Err(bucket.ready_at()),
            },
        }
    }

    /// Takes the tokens of a frame of so many bytes that was sent.
    #[inline]
    pub fn spend(&mut self, bytes: usize) {
        if let Some(bucket) = &mut self.0 {
            bucket.spend(bytes as u64);
        }
    }
}
