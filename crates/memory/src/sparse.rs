//! Memory files as files: copied where they have bytes, and emptied.

use std::os::fd::AsFd;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::region::{Region, RegionError};
use rackbus_fabric::Access;

/// Bytes that are mapped at a time while copying.
const CHUNK: u64 = 64 << 20;

fn system(what: &'static str) -> impl FnOnce(Errno) -> RegionError {
    move |cause| RegionError::System { what, cause }
}

/// Copies `length` bytes of one memory file to another that is zero there. Pages that the first
/// does not have stay away from the second as well.
///
/// # Errors
/// [`RegionError`] when a range is not in its file, or the system refuses.
pub fn copy_sparse(
    from: (impl AsFd, u64),
    to: (impl AsFd, u64),
    length: u64,
) -> Result<(), RegionError> {
    const PAGE: u64 = 4096;
    let (source, target) = (from.0.as_fd(), to.0.as_fd());
    let mut at = 0;
    while at < length {
        let data = match rustix::fs::seek(source, SeekFrom::Data(from.1 + at)) {
            Ok(data) => data.saturating_sub(from.1),
            Err(Errno::NXIO) => return Ok(()),
            Err(cause) => return Err(system("lseek(SEEK_DATA)")(cause)),
        };
        if data >= length {
            return Ok(());
        }
        let hole = rustix::fs::seek(source, SeekFrom::Hole(from.1 + data))
            .map_err(system("lseek(SEEK_HOLE)"))?;
        let end = hole.saturating_sub(from.1).min(length).min(data + CHUNK);
        if end <= data {
            // Whoever shares the file has taken the page away since it was found. Whatever it does
            // now is a write that came too late; it stops nobody from continuing.
            at = data + PAGE;
            continue;
        }
        let source = Region::map(source, from.1 + data, end - data, Access::READ)?;
        let target = Region::map(target, to.1 + data, end - data, Access::READ | Access::WRITE)?;
        target.whole().copy_from_slice(source.whole());
        if source.truncated() {
            return Err(system("copy")(Errno::IO));
        }
        at = end;
    }
    Ok(())
}

/// Calls `with` for each range of the first `length` bytes of a memory file that it has pages for, in order: where
/// it begins and where it ends. A file whose pages are as many bytes as it has is one range: to look for holes takes longer
/// than to ask for that. (Of huge pages a part may be behind its end, and then it may have some holes.)
pub fn each_data(file: impl AsFd, length: u64, mut with: impl FnMut(u64, u64)) {
    /// Bytes of what the system counts a file's pages in.
    const BLOCK: u64 = 512;
    let file = file.as_fd();
    let state = rustix::fs::fstat(file).ok().map(|it| (it.st_blocks as u64, it.st_size as u64));
    if let Some((blocks, size)) = state
        && length > 0
        && blocks.saturating_mul(BLOCK) >= size.max(length)
    {
        return with(0, length.min(size));
    }
    let mut at = 0;
    while at < length {
        // There is nothing behind the last page; whatever else is wrong with the file, it has none.
        let Ok(data) = rustix::fs::seek(file, SeekFrom::Data(at)) else { return };
        let Ok(hole) = rustix::fs::seek(file, SeekFrom::Hole(data)) else { return };
        if data < hole.min(length) {
            with(data, hole.min(length));
        }
        at = hole.max(data + 1);
    }
}

/// Takes the pages of a range away: whoever still maps them reads zeroes from now on, and they use
/// no memory.
///
/// # Errors
/// [`RegionError::System`] when the file is no memory file of ours.
pub fn empty(file: impl AsFd, offset: u64, length: u64) -> Result<(), RegionError> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, offset, length).map_err(system("fallocate(PUNCH_HOLE)"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::SharedMemory;

    #[test]
    fn copies_only_what_is_there_and_empties_for_every_holder() {
        let a = SharedMemory::create("a", 10 << 30).unwrap();
        let b = SharedMemory::create("b", 10 << 30).unwrap();
        for at in [0, 5 << 30, (10 << 30) - 5] {
            a.whole().part(at, 5).unwrap().copy_from(b"hello");
        }
        copy_sparse((&a, 0), (&b, 0), 10 << 30).unwrap();
        for at in [0, 5 << 30, (10 << 30) - 5] {
            let mut text = [0; 5];
            b.whole().part(at, 5).unwrap().copy_to(&mut text);
            assert_eq!(&text, b"hello");
        }
        // What was touched takes whole pages, and huge ones where the system has them.
        let [before, used] = [&a, &b].map(|it| rustix::fs::fstat(it).unwrap().st_blocks * 512);
        assert!(used <= before && before <= 3 << 21, "{used} bytes are used, {before} before");
        empty(&b, 0, 10 << 30).unwrap();
        assert_eq!(rustix::fs::fstat(&b).unwrap().st_blocks, 0);
        let mut text = [1; 5];
        b.whole().copy_to(&mut text);
        assert_eq!(text, [0; 5]);
    }

    #[test]
    fn holes_that_are_punched_meanwhile_do_not_stop_a_copy() {
        const LENGTH: u64 = 64 * 4096;
        let (a, done) = (SharedMemory::create("a", LENGTH).unwrap(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    for page in 0..LENGTH / 4096 {
                        a.whole().part(page as usize * 4096, 4).unwrap().copy_from(b"data");
                    }
                    for page in 0..LENGTH / 4096 {
                        empty(&a, page * 4096, 4096).unwrap();
                    }
                }
            });
            let outcome = (0..2_000).try_for_each(|_| {
                let b = SharedMemory::create("b", LENGTH).unwrap();
                copy_sparse((&a, 0), (&b, 0), LENGTH)
            });
            done.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
    }

    #[test]
    fn ranges_with_pages_are_found_also_where_all_have_some() {
        const PAGES: u64 = 8;
        let file = SharedMemory::create("data", PAGES * 4096).unwrap();
        let found = |length: u64| {
            let mut ranges = Vec::new();
            each_data(&file, length, |from, to| ranges.push((from, to)));
            ranges
        };
        assert_eq!(found(PAGES * 4096), []);
        for page in 0..PAGES {
            file.whole().part(page as usize * 4096, 1).unwrap().copy_from(&[1]);
        }
        assert_eq!(found(PAGES * 4096), [(0, PAGES * 4096)]);
        assert_eq!(found(4095), [(0, 4095)]);
        assert_eq!(found(0), []);
        if rustix::fs::fstat(&file).unwrap().st_blocks * 512 > PAGES as i64 * 4096 {
            // It has a huge page, where the system gives these to all memory files.
            return;
        }
        empty(&file, 3 * 4096, 4096).unwrap();
        assert_eq!(found(PAGES * 4096), [(0, 3 * 4096), (4 * 4096, PAGES * 4096)]);
        assert_eq!(found(2 * 4096), [(0, 2 * 4096)]);
    }

    #[test]
    fn a_part_is_copied_to_another_place() {
        let a = SharedMemory::create("a", 3 * 4096).unwrap();
        let b = SharedMemory::create("b", 4096).unwrap();
        a.whole().part(4096, 4).unwrap().copy_from(b"page");
        a.whole().part(8192, 4).unwrap().copy_from(b"next");
        copy_sparse((&a, 4096), (&b, 0), 4096).unwrap();
        let mut text = [0; 4];
        b.whole().copy_to(&mut text);
        assert_eq!(&text, b"page");
    }
}
