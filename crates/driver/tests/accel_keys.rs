//! Keys are gone when a function is given back, also those that were used: the process' memory is looked at, for keys
//! and for what AES makes of them.

mod scan;

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::InThreadFunction;
use rackbus_driver::accel::{Accel, AccelError, AccelOptions, MessageWork};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{Operation, OperationStatus};

/// What each byte is xored with of what must not be in memory by this test itself.
const MASK: u8 = 0xa5;

/// A key, masked.
const MASKED_KEY: [u8; 32] = {
    let mut key = [0; 32];
    let mut n = 0;
    while n < 32 {
        key[n] = (n as u8).wrapping_mul(37) ^ 0x6c;
        n += 1;
    }
    key
};

/// The round keys that AES-256 makes of it (FIPS 197, section 5.2), masked. The compiler computes them.
const MASKED_ROUNDS: [[u8; 16]; 15] = {
    let mut key = MASKED_KEY;
    let mut n = 0;
    while n < 32 {
        key[n] ^= MASK;
        n += 1;
    }
    let words = expand(key);
    let mut rounds = [[0; 16]; 15];
    let mut n = 0;
    while n < 240 {
        rounds[n / 16][n % 16] = words[n / 4][n % 4] ^ MASK;
        n += 1;
    }
    rounds
};

const fn sbox() -> [u8; 256] {
    let mut table = [0; 256];
    let (mut p, mut q) = (1u8, 1u8);
    loop {
        p ^= (p << 1) ^ if p & 0x80 != 0 { 0x1b } else { 0 };
        q ^= q << 1;
        q ^= q << 2;
        q ^= q << 4;
        q ^= if q & 0x80 != 0 { 0x09 } else { 0 };
        let rotated = q.rotate_left(1) ^ q.rotate_left(2) ^ q.rotate_left(3) ^ q.rotate_left(4);
        table[p as usize] = q ^ rotated ^ 0x63;
        if p == 1 {
            break;
        }
    }
    table[0] = 0x63;
    table
}

const fn expand(key: [u8; 32]) -> [[u8; 4]; 60] {
    let table = sbox();
    let mut words = [[0; 4]; 60];
    let mut round = 1u8;
    let mut n = 0;
    while n < 60 {
        let mut at = 0;
        while at < 4 {
            words[n][at] = if n < 8 {
                key[4 * n + at]
            } else {
                let before = words[n - 1];
                let mixed = match n % 8 {
                    0 => table[before[(at + 1) % 4] as usize] ^ if at == 0 { round } else { 0 },
                    4 => table[before[at] as usize],
                    _ => before[at],
                };
                words[n - 8][at] ^ mixed
            };
            at += 1;
        }
        if n > 0 && n % 8 == 0 {
            round <<= 1;
        }
        n += 1;
    }
    words
}

/// The last word of the example in FIPS 197, appendix A.3.
const _: () = {
    let key = *b"\x60\x3d\xeb\x10\x15\xca\x71\xbe\x2b\x73\xae\xf0\x85\x7d\x77\x81\x1f\x35\x2c\x07\x3b\x61\x08\xd7\x2d\x98\x10\xa3\x09\x14\xdf\xf4";
    let last = expand(key)[59];
    assert!(last[0] == 0x70 && last[1] == 0x6c && last[2] == 0x63 && last[3] == 0x1e);
};

/// Where this process has the key, and any of its round keys, in memory that it may write to.
fn found() -> (Vec<String>, Vec<String>) {
    let is = |bytes: &[u8], masked: &[u8]| bytes.iter().zip(masked).all(|(a, b)| a ^ MASK == *b);
    let mut is_first = [false; 256];
    MASKED_ROUNDS.iter().for_each(|round| is_first[usize::from(round[0] ^ MASK)] = true);
    assert!(!is_first[0]);
    let (mut keys, mut rounds) = (Vec::new(), Vec::new());
    // Neither the key nor a round key begins with zero.
    scan::each_mapping(|line, data, places| {
        for at in places.filter(|at| is_first[usize::from(data[*at])]) {
            let is_at = |masked: &[u8]| {
                data.get(at..at + masked.len()).is_some_and(|bytes| is(bytes, masked))
            };
            if is_at(&MASKED_KEY) {
                keys.push(format!("{at:#x} behind {line}"));
            }
            if let Some(nth) = MASKED_ROUNDS.iter().position(|round| is_at(round)) {
                rounds.push(format!("{nth} at {at:#x} behind {line}"));
            }
        }
    });
    (keys, rounds)
}

fn accel(pool: &std::sync::Arc<EnginePool>) -> Accel {
    let model = Accelerator::new(pool, TenantId(1), None, 1).unwrap();
    let options = AccelOptions { data: 8 << 20, ..AccelOptions::default() };
    Accel::start(Box::new(InThreadFunction::new(Box::new(model))), options).unwrap()
}

/// Contexts of the key for each operation that takes one, again and again.
fn create(accel: &mut Accel, times: usize) -> Vec<(Operation, u16)> {
    let mut key: Vec<u8> = MASKED_KEY.iter().map(|byte| byte ^ MASK).collect();
    let of = [Operation::Aes256Ctr, Operation::Aes256GcmSeal, Operation::Aes256GcmOpen];
    let contexts = of.iter().cycle().take(of.len() * times);
    let contexts = contexts.map(|of| (*of, accel.create_context(*of, &key).unwrap())).collect();
    key.fill(0);
    assert_eq!(std::hint::black_box(&key)[31], 0);
    contexts
}

/// Messages of all lengths: done by the function's thread at once, by an engine whole, and in parts.
fn use_keys(accel: &mut Accel, contexts: &[(Operation, u16)]) {
    let [ctr, seal, open] = [0, 1, 2].map(|nth| contexts[nth]);
    let run = |accel: &mut Accel, stages: &[(Operation, u16)], input: &[u8]| {
        let work = MessageWork { stages, nonce: [3; 16], ..MessageWork::default() };
        accel.run(&work, input, (input.len() + 4096).min(1 << 20))
    };
    for length in [16, 64, 4096, 100_000, 1 << 20] {
        let length = length - 16;
        let message = vec![7; length];
        run(accel, &[ctr], &message).unwrap();
        run(accel, &[(Operation::Lz4Compress, 0), ctr, (Operation::Sha256, 0)], &message).unwrap();
        let mut sealed = run(accel, &[seal], &message).unwrap();
        assert_eq!(run(accel, &[open], &sealed).unwrap(), message);
        sealed[0] ^= 1;
        let forged = run(accel, &[open], &sealed).unwrap_err();
        let AccelError::Operation { status: OperationStatus::NotAuthentic, .. } = forged else {
            panic!("{forged}")
        };
    }
}

#[test]
fn keys_and_what_is_made_of_them_are_gone_when_the_function_is_given_back() {
    for workers in [1, 3] {
        let pool = EnginePool::new(PoolOptions { workers, ..PoolOptions::default() });
        let mut tenant = accel(&pool);
        create(&mut tenant, 7);
        let (keys, rounds) = found();
        assert!(keys.len() >= 21 && rounds.len() >= 21 * 15, "{keys:?}, {rounds:?}");
        drop(tenant);
        assert_eq!(found(), <(Vec<String>, Vec<String>)>::default(), "keys that were not used");
        let mut tenant = accel(&pool);
        let contexts = create(&mut tenant, 1);
        for _ in 0..2 {
            use_keys(&mut tenant, &contexts);
        }
        assert!(!found().0.is_empty());
        drop(tenant);
        let none = <(Vec<String>, Vec<String>)>::default();
        assert_eq!(found(), none, "keys that were used, with {workers} engines");
    }
}
