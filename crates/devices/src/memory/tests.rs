//! Memory functions: what users share, what is taken away from them, and what goes on elsewhere.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rackbus_memory::{Access, Handles, Region as Mapping};
use rackbus_pci::endpoint::{Endpoint, FunctionRegion};
use rackbus_pci::{MediumRefused, RestoreError, SaveError};
use rackbus_spec::pcie::Command;

use super::*;
use crate::class::parse_rack;
use crate::lost::Lost;

const SIZE: u64 = 1 << 20;

fn endpoint(span: MemorySpan) -> Endpoint {
    let mut endpoint = Endpoint::new(Box::new(MemoryFunction::new(span, 7).unwrap()));
    enable(&mut endpoint);
    endpoint
}

fn enable(endpoint: &mut Endpoint) {
    let command = Command::MEMORY_SPACE.bits().to_le_bytes();
    endpoint.write(FunctionRegion::Config, 4, &command).unwrap();
}

/// What a user of `endpoint` maps its BAR by.
fn mapped(endpoint: &Endpoint) -> File {
    let bars = endpoint.bars();
    let bar = bars.iter().find(|bar| bar.index == BAR).unwrap();
    assert!(bar.prefetchable && bar.is_64bit && bar.size == SIZE);
    let mappable = bar.mappable.as_ref().unwrap();
    assert_eq!(mappable.areas, [(0, SIZE)]);
    File::from(mappable.memory.descriptor().unwrap())
}

fn read(endpoint: &mut Endpoint, offset: u64) -> [u8; 8] {
    let mut data = [0; 8];
    endpoint.read(FunctionRegion::Bar(BAR), offset, &mut data).unwrap();
    data
}

fn at(file: &File, offset: u64) -> [u8; 8] {
    let mut data = [0; 8];
    file.read_exact_at(&mut data, offset).unwrap();
    data
}

/// A span in a memory file, and one in a file of `folder`.
fn spans(folder: &Path, at_return: AtReturn) -> [MemorySpan; 2] {
    let file = folder.join(format!("{at_return:?}.img"));
    [
        MemorySpan::memory(SIZE, at_return).unwrap(),
        MemorySpan::file(&file, SIZE, at_return).unwrap(),
    ]
}

#[test]
fn loads_and_stores_reach_the_same_bytes_trapped_and_mapped() {
    let mut endpoint = endpoint(MemorySpan::memory(SIZE, AtReturn::Zero).unwrap());
    let file = mapped(&endpoint);
    let mapping = Mapping::map(file.as_fd(), 0, SIZE, Access::all()).unwrap();
    endpoint.write(FunctionRegion::Bar(BAR), SIZE - 8, b"trapped!").unwrap();
    let mut found = [0; 8];
    mapping.slice(SIZE as usize - 8, 8).unwrap().copy_to(&mut found);
    assert_eq!(&found, b"trapped!");
    // What a user does to its descriptor is its own.
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::APPEND).unwrap();
    endpoint.write(FunctionRegion::Bar(BAR), 0, b"in place").unwrap();
    assert_eq!(&read(&mut endpoint, 0), b"in place");
    mapping.slice(64, 8).unwrap().copy_from(b"mapped!!");
    assert_eq!(&read(&mut endpoint, 64), b"mapped!!");
    endpoint.reset();
    enable(&mut endpoint);
    assert_eq!(&read(&mut endpoint, 64), b"mapped!!", "a function-level reset keeps memory");
    // Those that came one by one.
    let counts = endpoint.operations().counts(&[]);
    let counted: Vec<_> = counts.iter().map(|(name, of)| (*name, of.done, of.bytes)).collect();
    assert_eq!(counted, [("read", 3, 24), ("write", 2, 16)]);
}

/// Invariant I4, against a user that keeps its mapping for ever.
#[test]
fn a_returned_span_is_another_users_and_the_old_mapping_leads_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    for at_return in [AtReturn::Zero, AtReturn::Keep] {
        for span in spans(folder.path(), at_return) {
            let mut endpoint = endpoint(span);
            let old = mapped(&endpoint);
            old.write_all_at(b"content!", 4096).unwrap();
            endpoint.scrub();
            enable(&mut endpoint);
            let left = if at_return == AtReturn::Keep { *b"content!" } else { [0; 8] };
            assert_eq!(read(&mut endpoint, 4096), left);
            old.write_all_at(b"too late", 4096).unwrap();
            assert_eq!(read(&mut endpoint, 4096), left, "a store of the old user is seen");
            let new = mapped(&endpoint);
            assert_eq!(at(&new, 4096), left);
            new.write_all_at(b"of mine!", 8192).unwrap();
            assert_eq!(at(&old, 8192), [0; 8], "the old user sees stores of the new one");
            assert_eq!(at(&old, 0), [0; 8]);
        }
    }
}

#[test]
fn a_file_is_taken_away_from_earlier_mappings_and_used_by_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram.img");
    let first = MemorySpan::file(&path, SIZE, AtReturn::Keep).unwrap();
    let old = File::from(first.descriptor().unwrap());
    old.write_all_at(b"content!", 0).unwrap();
    let refused = MemorySpan::file(&path, SIZE, AtReturn::Keep).unwrap_err();
    assert!(matches!(refused, SpanError::InUse { .. }), "{refused}");
    // Whoever mapped it continues, and may lock what it has; its node has ended.
    rustix::fs::flock(&old, rustix::fs::FlockOperation::LockExclusive).unwrap();
    drop(first);
    let second = MemorySpan::file(&path, SIZE, AtReturn::Keep).unwrap();
    old.write_all_at(b"too late", 0).unwrap();
    let mut data = [0; 8];
    second.read(0, &mut data).unwrap();
    assert_eq!(&data, b"content!");
    let refused = MemorySpan::file(&path, 2 * SIZE, AtReturn::Keep).map(drop);
    assert!(refused.is_err());
    drop(second);
    let refused = MemorySpan::file(&path, 2 * SIZE, AtReturn::Keep).unwrap_err().to_string();
    assert!(refused.contains("it has 1048576 bytes, not 2097152"), "{refused}");
    let refused = MemorySpan::file(Path::new("/dev/null"), SIZE, AtReturn::Zero).unwrap_err();
    assert!(refused.to_string().contains("name a file on a DAX file system"), "{refused}");
}

#[test]
fn a_reserved_file_has_room_for_all_of_it_wherever_its_content_moves() {
    use std::os::unix::fs::MetadataExt;

    // On a disk: folders for temporary files are often in memory.
    let program = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    let mut span = MemorySpan::reserved(&folder.path().join("own.img"), SIZE).unwrap();
    span.write(4096, b"content!").unwrap();
    span.write(SIZE - 8, b"the end!").unwrap();
    for _ in 0..2 {
        span.take_away().unwrap();
        let file = File::from(span.descriptor().unwrap());
        assert!(file.metadata().unwrap().blocks() * 512 >= SIZE);
        let found = [0, 4096, SIZE - 8].map(|offset| at(&file, offset));
        assert_eq!(found, [[0; 8], *b"content!", *b"the end!"]);
    }
}

/// A user that truncates a file that it was given harms itself.
#[test]
fn a_truncated_file_reads_as_ones_and_is_whole_for_the_next_user() {
    let folder = tempfile::tempdir().unwrap();
    let [_, span] = spans(folder.path(), AtReturn::Keep);
    let mut endpoint = endpoint(span);
    let old = mapped(&endpoint);
    old.write_all_at(b"content!", 0).unwrap();
    old.set_len(4096).unwrap();
    assert_eq!(read(&mut endpoint, 8192), [0xff; 8]);
    endpoint.scrub();
    enable(&mut endpoint);
    assert_eq!((read(&mut endpoint, 8192), &read(&mut endpoint, 0)), ([0; 8], b"content!"));
    assert_eq!(mapped(&endpoint).metadata().unwrap().len(), SIZE);
}

/// The node was killed before it took the file away, so that what its user made of the file is what the next life finds.
#[test]
fn a_file_whose_size_a_user_changed_is_lent_again_after_the_node_was_killed() {
    let program = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    let plain = |path: &Path| MemorySpan::file(path, SIZE, AtReturn::Keep);
    let reserved = |path: &Path| MemorySpan::reserved(path, SIZE);
    for has_room in [false, true] {
        let open = |path: &Path| if has_room { reserved(path) } else { plain(path) };
        for size in [SIZE + 1, 4096] {
            let path = folder.path().join(format!("{has_room}-{size}.img"));
            let user = File::from(open(&path).unwrap().descriptor().unwrap());
            user.write_all_at(b"content!", 0).unwrap();
            user.write_all_at(b"the end!", SIZE - 8).unwrap();
            user.set_len(size).unwrap();
            let span = open(&path).unwrap();
            let file = File::from(span.descriptor().unwrap());
            assert_eq!(file.metadata().unwrap().len(), SIZE);
            let end = if size > SIZE { *b"the end!" } else { [0; 8] };
            assert_eq!([at(&file, 0), at(&file, SIZE - 8)], [*b"content!", end]);
        }
    }
}

/// Who has the lender's machine may: the file's size is not a user's then.
#[test]
fn a_file_of_another_size_is_refused_until_the_size_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ram.img");
    drop(MemorySpan::file(&path, SIZE, AtReturn::Keep).unwrap());
    let refused = MemorySpan::file(&path, 2 * SIZE, AtReturn::Keep).unwrap_err().to_string();
    assert!(refused.contains("it has 1048576 bytes, not 2097152"), "{refused}");
    File::options().write(true).open(&path).unwrap().set_len(2 * SIZE).unwrap();
    drop(MemorySpan::file(&path, 2 * SIZE, AtReturn::Keep).unwrap());
    let refused = MemorySpan::file(&path, SIZE, AtReturn::Keep).unwrap_err().to_string();
    assert!(refused.contains("it has 2097152 bytes, not 1048576"), "{refused}");
    // Nobody was given the file since it was made whole: who extended it has the lender's machine.
    drop(MemorySpan::file(&path, 2 * SIZE, AtReturn::Keep).unwrap());
    File::options().write(true).open(&path).unwrap().set_len(3 * SIZE).unwrap();
    let refused = MemorySpan::file(&path, 2 * SIZE, AtReturn::Keep).unwrap_err().to_string();
    assert!(refused.contains("it has 3145728 bytes, not 2097152"), "{refused}");
    // Whatever was there before, a file that is gone is made.
    std::fs::remove_file(&path).unwrap();
    drop(MemorySpan::file(&path, SIZE, AtReturn::Keep).unwrap());
    // A file of the lender's own, which no life of a node has used.
    let other = folder.path().join("other.img");
    File::create(&other).unwrap().set_len(4096).unwrap();
    let refused = MemorySpan::file(&other, SIZE, AtReturn::Keep).unwrap_err().to_string();
    assert!(refused.contains("it has 4096 bytes, not 1048576"), "{refused}");
}

#[test]
fn a_front_elsewhere_has_the_same_bytes_until_the_lender_takes_them_away() {
    let mut lender = endpoint(MemorySpan::memory(SIZE, AtReturn::Zero).unwrap());
    let offer = lender.serve_medium(None).unwrap();
    assert!(matches!(lender.serve_medium(None), Err(MediumRefused::InUse)));
    let lost = Lost::new(|| {});
    let front = crate::class::front(
        offer.class,
        &offer.description,
        rackbus_pci::MediumAccess::Handles(offer.handles),
        lost,
    )
    .unwrap();
    let mut front = Endpoint::new(front);
    enable(&mut front);
    let old = mapped(&front);
    old.write_all_at(b"content!", 0).unwrap();
    assert_eq!(&read(&mut front, 0), b"content!");
    assert_eq!(&read(&mut lender, 0), b"content!");
    // What the front does is not what takes memory away.
    front.scrub();
    assert_eq!(&read(&mut lender, 0), b"content!");
    lender.scrub();
    enable(&mut lender);
    old.write_all_at(b"too late", 0).unwrap();
    assert_eq!(read(&mut lender, 0), [0; 8]);
    lender.serve_medium(None).unwrap();
}

#[test]
fn a_front_of_memory_that_does_not_fit_is_refused() {
    let file = || MemorySpan::memory(SIZE, AtReturn::Zero).unwrap().descriptor().unwrap();
    let pipe = || rustix::pipe::pipe().unwrap().0;
    for (description, files, expected) in [
        ("{}", vec![file()], "missing field"),
        ("{\"size\":1048576,\"serial\":1}", vec![], "came without memory"),
        ("{\"size\":1048576,\"serial\":1}", vec![file(), file()], "1 more handles"),
        ("{\"size\":2097152,\"serial\":1}", vec![file()], "no file of 2097152 bytes"),
        ("{\"size\":1000000,\"serial\":1}", vec![file()], "no file of 1000000 bytes"),
        ("{\"size\":0,\"serial\":1}", vec![file()], "no file of 0 bytes"),
        ("{\"size\":1048576,\"serial\":1}", vec![pipe()], "no file of 1048576 bytes"),
    ] {
        let handles = Handles::of_descriptors(files);
        let said = MemoryFunction::front(description, handles).unwrap_err().to_string();
        assert!(said.contains(expected), "{description}: {said}");
    }
}

#[test]
fn a_saved_function_goes_on_with_its_bytes_and_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("Zero.img");
    for (nth, span) in spans(folder.path(), AtReturn::Zero).into_iter().enumerate() {
        let mut first = endpoint(span);
        let user = mapped(&first);
        user.write_all_at(b"content!", 0).unwrap();
        let saved = first.save().unwrap();
        drop(first);
        let home = (nth == 1).then_some(&*path);
        let span = MemorySpan::again(home, SIZE, AtReturn::Zero, saved.medium).unwrap();
        assert!(
            nth == 0 || MemorySpan::file(&path, SIZE, AtReturn::Zero).is_err(),
            "it is locked no more"
        );
        let other = MemoryFunction::new(span, 8).unwrap();
        let mut second = Endpoint::new(Box::new(other));
        let refused = second.restore(&saved.state, saved.descriptors).unwrap_err();
        assert!(matches!(refused, RestoreError::Different(_)), "{refused}");
    }
    let mut first = endpoint(MemorySpan::memory(SIZE, AtReturn::Zero).unwrap());
    let user = mapped(&first);
    user.write_all_at(b"content!", 0).unwrap();
    let saved = first.save().unwrap();
    let span = MemorySpan::again(None, SIZE, AtReturn::Zero, saved.medium).unwrap();
    drop(first);
    let mut second = Endpoint::new(Box::new(MemoryFunction::new(span, 7).unwrap()));
    second.restore(&saved.state, saved.descriptors).unwrap();
    assert_eq!(&read(&mut second, 0), b"content!", "memory space stays enabled");
    user.write_all_at(b"goes on!", 0).unwrap();
    assert_eq!(&read(&mut second, 0), b"goes on!");
    second.scrub();
    enable(&mut second);
    assert_eq!(read(&mut second, 0), [0; 8]);
}

/// Here, the file's folder is gone.
#[test]
fn memory_that_could_not_be_taken_away_is_never_lent_again() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("own");
    std::fs::create_dir(&own).unwrap();
    let mut endpoint =
        endpoint(MemorySpan::file(&own.join("ram.img"), SIZE, AtReturn::Keep).unwrap());
    let old = mapped(&endpoint);
    old.write_all_at(b"content!", 0).unwrap();
    std::fs::remove_dir_all(&own).unwrap();
    endpoint.scrub();
    enable(&mut endpoint);
    assert!(endpoint.health().trouble().is_some());
    assert_eq!(read(&mut endpoint, 0), [0xff; 8]);
    assert!(matches!(endpoint.serve_medium(None), Err(MediumRefused::Files(_))));
    let refused = endpoint.save().map(drop).unwrap_err();
    assert!(matches!(refused, SaveError::Descriptors(_)), "{refused}");
    std::fs::create_dir(&own).unwrap();
    endpoint.scrub();
    enable(&mut endpoint);
    assert_eq!((endpoint.health().trouble(), &read(&mut endpoint, 0)), (None, b"content!"));
    old.write_all_at(b"too late", 0).unwrap();
    assert_eq!(&read(&mut endpoint, 0), b"content!");
}

#[test]
fn what_the_rack_file_says_is_read_or_refused_with_its_place() {
    let read = |keys: &str| {
        let head = "name = \"lab\"\n[hosts.alpha.devices.ram0]\nkind = \"memory\"\n";
        let parsed = parse_rack("rack.toml", &format!("{head}{keys}"));
        let detail = parsed.map(|(_, devices)| devices[0].config.as_ref().unwrap().detail());
        detail.unwrap_or_else(|error| error.to_string())
    };
    assert_eq!(read("size = \"1 TiB\""), "1 TiB, memory, zeroed at return");
    let all = read("size = \"1 MiB\"\nbacking = \"./ram.img\"\nat_return = \"keep\"");
    assert_eq!(all, "1 MiB, ./ram.img, kept at return");
    for (keys, expected) in [
        ("", "rack.toml:2:22: device alpha/ram0 has no `size`"),
        ("size = \"3 MiB\"", "rack.toml:4:8: `size` is 3 MiB; a BAR's size is a power of two"),
        ("size = \"64 KiB\"", "it is from 1 MiB to 64 TiB"),
        ("size = \"1 MiB\"\nbacking = \"null\"", "rack.toml:5:11: there is no backing `null`"),
        ("size = \"1 MiB\"\nat_return = \"lost\"", "rack.toml:5:13: `at_return` is lost"),
        ("size = \"1 MiB\"\nserial = \"x\"", "rack.toml:5:1: unknown key `serial`"),
    ] {
        let said = read(keys);
        assert!(said.contains(expected), "{keys:?}\n gives {said}\n not {expected}");
    }
}
