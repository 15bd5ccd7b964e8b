//! Where labels go: never over one another.

use super::svg::Rect;

/// Centres for labels that want to be at `wanted` (centre and size, in any order), moved as little
/// as it takes for them not to overlap; between `from` and `to`, or on beyond `to` when they need
/// more.
///
/// Least squares, by pooling adjacent violators: labels that touch move as one block, to the mean
/// of what its labels want.
pub(super) fn spread(wanted: &[(f64, f64)], from: f64, to: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].0.total_cmp(&wanted[b].0));
    // Where each would start if those before it took no room: these must not descend.
    let mut before = 0.0;
    let mut blocks: Vec<(f64, usize)> = Vec::new(); // the mean, of how many
    for &at in &order {
        let (centre, size) = wanted[at];
        let mut block = (centre - size / 2.0 - before, 1);
        before += size;
        while let Some(&(mean, many)) = blocks.last().filter(|last| last.0 > block.0) {
            blocks.pop();
            let all = many + block.1;
            block = ((mean * many as f64 + block.0 * block.1 as f64) / all as f64, all);
        }
        blocks.push(block);
    }
    let last = (to - before).max(from);
    let starts = blocks.into_iter().flat_map(|(start, many)| std::iter::repeat_n(start, many));
    let mut centres = vec![0.0; wanted.len()];
    let mut before = 0.0;
    for (&at, start) in order.iter().zip(starts) {
        let size = wanted[at].1;
        centres[at] = start.clamp(from, last) + before + size / 2.0;
        before += size;
    }
    centres
}

/// What is taken already, for labels that may stand in several places.
#[derive(Debug, Default)]
pub(super) struct TakenPlaces {
    taken: Vec<Rect>,
    /// What may be written over if it must.
    lines: Vec<Rect>,
}

impl TakenPlaces {
    /// Nothing may stand here.
    pub fn take(&mut self, rect: Rect) {
        self.taken.push(rect);
    }

    /// Nothing should stand along this line.
    pub fn take_line(&mut self, from: (f64, f64), to: (f64, f64), width: f64) {
        let long = (to.0 - from.0).hypot(to.1 - from.1);
        let pieces = (long / 4.0).ceil().max(1.0);
        for piece in 0..=pieces as usize {
            let part = piece as f64 / pieces;
            let (x, y) = (from.0 + (to.0 - from.0) * part, from.1 + (to.1 - from.1) * part);
            self.lines.push(Rect::around(x, y, width, width));
        }
    }

    /// The first of `candidates` that is free, also of lines; it is free no longer.
    pub fn place(&mut self, candidates: impl IntoIterator<Item = Rect>) -> Option<Rect> {
        let free = |rect: &Rect| !self.lines.iter().any(|line| line.overlaps(rect));
        let clear: Vec<Rect> = candidates.into_iter().filter(free).collect();
        self.place_over_lines(clear)
    }

    /// The first of `candidates` that is free but for lines; it is free no longer.
    pub fn place_over_lines(&mut self, candidates: impl IntoIterator<Item = Rect>) -> Option<Rect> {
        let free = |rect: &Rect| !self.taken.iter().any(|taken| taken.overlaps(rect));
        let found = candidates.into_iter().find(free)?;
        self.take(found);
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Labels keep their order and their distance, and delay within what there is when they fit.
        #[test]
        fn labels_never_overlap(
            wanted in prop::collection::vec((0.0..300.0f64, 8.0..40.0f64), 1..20),
        ) {
            let centres = spread(&wanted, 0.0, 300.0);
            let mut spans: Vec<(f64, f64)> =
                centres.iter().zip(&wanted).map(|(c, w)| (c - w.1 / 2.0, c + w.1 / 2.0)).collect();
            spans.sort_by(|a, b| a.0.total_cmp(&b.0));
            prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-6), "{spans:?}");
            prop_assert!(spans[0].0 >= -1e-6);
            if wanted.iter().map(|w| w.1).sum::<f64>() <= 300.0 {
                prop_assert!(spans[spans.len() - 1].1 <= 300.0 + 1e-6, "{spans:?}");
            }
            for (a, one) in wanted.iter().enumerate() {
                for (b, other) in wanted.iter().enumerate() {
                    prop_assert!(one.0 >= other.0 || centres[a] < centres[b], "order: {a} {b}");
                }
            }
        }

        /// Labels that are clear of one another delay where they want to be.
        #[test]
        fn labels_move_only_when_they_must(steps in prop::collection::vec(10.0..40.0f64, 1..8)) {
            let wanted: Vec<(f64, f64)> = steps
                .iter()
                .scan(0.0, |at, step| {
                    *at += step;
                    Some((*at, 10.0))
                })
                .collect();
            for (centre, wanted) in spread(&wanted, 0.0, 300.0).iter().zip(&wanted) {
                prop_assert!((centre - wanted.0).abs() < 1e-6);
            }
        }

        /// What is placed is clear of everything placed before.
        #[test]
        fn places_are_taken_once(at in prop::collection::vec((0.0..60.0f64, 0.0..60.0f64), 1..20)) {
            let mut places = TakenPlaces::default();
            let rects = at.iter().map(|&(x, y)| {
                [(x, y), (y, x)].map(|(x, y)| Rect::new(x, y, 9.0, 9.0))
            });
            let placed: Vec<Rect> = rects.filter_map(|rects| places.place(rects)).collect();
            prop_assert!(!placed.is_empty());
            for (i, a) in placed.iter().enumerate() {
                prop_assert!(placed[..i].iter().all(|b| !a.overlaps(b)));
            }
        }
    }
}
