//! Alerts of a connection that the kernel seals: a record's type goes beside its bytes, which no library offers.
#![allow(unsafe_code)]

use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// The type of records that are alerts (RFC 8446, section 5.1).
const ALERT: u8 = 21;
/// Bytes of the control message that says so, aligned.
const CONTROL: usize = 32;
// SAFETY: these compute sizes, and access nothing.
const LENGTH: u32 = unsafe { libc::CMSG_LEN(1) };
// SAFETY: as above.
const SPACE: u32 = unsafe { libc::CMSG_SPACE(1) };
const _: () = assert!(SPACE as usize <= CONTROL);

/// Memory of a control message, aligned as its header.
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Sends an alert, if the socket takes it now.
pub(super) fn send(socket: &TcpStream, alert: &[u8; 2]) {
    let mut control = Control([0; CONTROL]);
    let mut bytes = *alert;
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: `msghdr` is plain data, of which all zeroes are a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = SPACE as _;
    // SAFETY: the control buffer is aligned, lives until the call, and has room for a header and a byte behind it: so the
    // first header is in it, and its data too.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_TLS;
        (*header).cmsg_type = libc::TLS_SET_RECORD_TYPE;
        (*header).cmsg_len = LENGTH as _;
        libc::CMSG_DATA(header).write(ALERT);
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: all that `message` leads to lives, and is not changed by the call.
    if unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) } < 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "the end of a connection could not be told");
    }
}
