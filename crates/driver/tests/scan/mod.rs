//! This process' memory as it is, for tests that look for what must not be there.

use std::os::unix::fs::FileExt;

const PAGE: usize = 4096;
const ZEROES: [u8; PAGE] = [0; PAGE];

/// Visits the memory that this process may write to: each mapping with its line of `/proc/self/maps`, and the places in
/// it that may be the first of something that does not begin with zero.
pub fn each_mapping(mut visit: impl FnMut(&str, &[u8], &mut dyn Iterator<Item = usize>)) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        let mut data = vec![0; (number(to) - number(from)) as usize];
        if memory.read_exact_at(&mut data, number(from)).is_err() {
            continue;
        }
        let used = data.chunks(PAGE).enumerate();
        let used = used.filter(|(_, bytes)| *bytes != &ZEROES[..bytes.len()]);
        let mut places = used.flat_map(|(page, bytes)| page * PAGE..page * PAGE + bytes.len());
        visit(line, &data, &mut places);
        // What was found is not found again in this copy of it.
        data.fill(0);
        std::hint::black_box(&data);
    }
}
