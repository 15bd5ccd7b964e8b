//! An offload server as one would write it without shared queues: messages over a UNIX socket, encrypted by a thread
//! on another processor, both ends with io_uring. Whatever waits goes in one system call, so that with many messages
//! under way a call carries many.
#![allow(unsafe_code)] // io_uring: the kernel is given addresses of buffers that stay where they are

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use aes::Aes256;
use aes::cipher::{KeyIvInit, StreamCipher};
use io_uring::{IoUring, opcode, types};

use super::direct::KEY;
use crate::BenchError;
use crate::machine::{SERVER_CPU, pin};

/// Bytes of a socket's buffers, and of those beside it.
const BUFFER: usize = 1 << 20;
const RECEIVED: u64 = 1;
const SENT: u64 = 2;

/// One end of the conversation.
struct End {
    ring: IoUring,
    socket: UnixStream,
    /// What came: the first `have` bytes.
    input: Vec<u8>,
    have: usize,
    receiving: bool,
    /// What is being sent, from `gone` on, and what is sent after that.
    output: Vec<u8>,
    gone: usize,
    sending: bool,
    next: Vec<u8>,
    closed: bool,
}

impl End {
    fn new(socket: UnixStream) -> std::io::Result<End> {
        let ring = IoUring::new(8)?;
        let (input, output, next) =
            (vec![0; BUFFER], Vec::with_capacity(BUFFER), Vec::with_capacity(BUFFER));
        Ok(End {
            ring,
            socket,
            input,
            have: 0,
            receiving: false,
            output,
            gone: 0,
            sending: false,
            next,
            closed: false,
        })
    }

    /// Sends and receives what can be, and waits until something was.
    fn exchange(&mut self) -> std::io::Result<()> {
        let fd = types::Fd(self.socket.as_raw_fd());
        if !self.sending && self.gone == self.output.len() && !self.next.is_empty() {
            self.output.clear();
            self.gone = 0;
            std::mem::swap(&mut self.output, &mut self.next);
        }
        if !self.sending && self.gone < self.output.len() {
            let rest = &self.output[self.gone..];
            let entry = opcode::Send::new(fd, rest.as_ptr(), rest.len() as u32);
            // SAFETY: the bytes stay as they are until this was completed: `output` changes when nothing is sent.
            let pushed = unsafe { self.ring.submission().push(&entry.build().user_data(SENT)) };
            self.sending = pushed.is_ok();
        }
        if !self.receiving && self.have < self.input.len() {
            let room = &mut self.input[self.have..];
            let entry = opcode::Recv::new(fd, room.as_mut_ptr(), room.len() as u32);
            // SAFETY: nobody touches the bytes behind `have` until this was completed, and `input` does not move.
            let pushed = unsafe { self.ring.submission().push(&entry.build().user_data(RECEIVED)) };
            self.receiving = pushed.is_ok();
        }
        self.ring.submit_and_wait(1)?;
        for completion in self.ring.completion() {
            let count = usize::try_from(completion.result())
                .map_err(|_| std::io::Error::from_raw_os_error(-completion.result()))?;
            if completion.user_data() == SENT {
                (self.sending, self.gone) = (false, self.gone + count);
            } else {
                (self.receiving, self.have) = (false, self.have + count);
                self.closed |= count == 0;
            }
        }
        Ok(())
    }

    /// Hands each whole message of so many bytes to `each`, with where answers go. Not while bytes are being received.
    fn messages(&mut self, bytes: usize, mut each: impl FnMut(&[u8], &mut Vec<u8>)) -> usize {
        if self.receiving {
            return 0;
        }
        let whole = self.have / bytes;
        for message in self.input[..whole * bytes].chunks_exact(bytes) {
            each(message, &mut self.next);
        }
        self.input.copy_within(whole * bytes..self.have, 0);
        self.have -= whole * bytes;
        whole
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // What the kernel was given must be over before the buffers go.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        while self.sending || self.receiving {
            if self.exchange_ended().is_err() {
                break;
            }
        }
    }
}

impl End {
    fn exchange_ended(&mut self) -> std::io::Result<()> {
        self.ring.submit_and_wait(1)?;
        for completion in self.ring.completion() {
            match completion.user_data() {
                SENT => self.sending = false,
                _ => self.receiving = false,
            }
        }
        Ok(())
    }
}

/// A server on a thread of its own, and the client's end.
pub struct UringServer {
    end: End,
    bytes: usize,
    depth: usize,
}

impl UringServer {
    /// Starts a server for messages of so many bytes, of which so many are under way.
    ///
    /// # Errors
    /// When there is no io_uring.
    pub fn start(bytes: usize, depth: usize) -> Result<UringServer, BenchError> {
        let failed = || BenchError::io("an offload server with io_uring");
        let (ours, theirs) = UnixStream::pair().map_err(failed())?;
        for socket in [&ours, &theirs] {
            // What the system does not allow it cuts; the sockets work anyway.
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, BUFFER);
            let _ = rustix::net::sockopt::set_socket_recv_buffer_size(socket, BUFFER);
        }
        let mut served = End::new(theirs).map_err(failed())?;
        let serve = move || {
            pin(SERVER_CPU);
            while !served.closed && served.exchange().is_ok() {
                served.messages(bytes, |message, out| {
                    let at = out.len();
                    out.resize(at + message.len(), 0);
                    let mut cipher = ctr::Ctr128BE::<Aes256>::new(&KEY.into(), &[0; 16].into());
                    let _ = cipher.try_apply_keystream_b2b(message, &mut out[at..]);
                });
            }
        };
        let thread = std::thread::Builder::new().name("offload server".to_owned());
        thread.spawn(serve).map_err(failed())?;
        Ok(UringServer { end: End::new(ours).map_err(failed())?, bytes, depth })
    }

    /// Measures for `time` how many messages are answered each second.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn rate(&mut self, time: Duration) -> Result<f64, BenchError> {
        let failed = || BenchError::io("an offload server with io_uring");
        let message = vec![7; self.bytes];
        for _ in 0..self.depth {
            self.end.next.extend_from_slice(&message);
        }
        let (mut begun, mut done, mut warm) = (Instant::now(), 0usize, true);
        let mut under_way = self.depth;
        loop {
            self.end.exchange().map_err(failed())?;
            let elapsed = begun.elapsed();
            let over = !warm && elapsed >= time;
            let came = self.end.messages(self.bytes, |_, next| {
                if !over {
                    next.extend_from_slice(&message);
                }
            });
            done += came;
            if warm && elapsed >= time / 10 {
                (begun, done, warm) = (Instant::now(), 0, false);
            }
            if over {
                let rate = (done - came) as f64 / elapsed.as_secs_f64();
                under_way -= came;
                while under_way > 0 {
                    self.end.exchange().map_err(failed())?;
                    under_way -= self.end.messages(self.bytes, |_, _| {});
                }
                return Ok(rate);
            }
        }
    }
}
