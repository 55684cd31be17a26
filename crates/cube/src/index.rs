//! The index of a partition: maps signs to row numbers with buckets of one cache line that hold a tag of each sign.

use std::collections::VecDeque;

use elasticrec_table::partition::{mix, partition_of_mixed};

use crate::CubeError;
use crate::compare::{BUCKET_BYTES, Bucket, Compare};

/// A bucket has 29 tags, the number of used ones, flags, and the row of the first tag.
const SLOTS: usize = 29;
const COUNT_AT: usize = 58;
const FLAGS_AT: usize = 59;
const FIRST_ROW_AT: usize = 60;
/// Flag: searches continue in the next bucket.
const OVERFLOWED: u8 = 1;
/// Each record is a sign and its row, because tags are too short to identify a sign.
pub(crate) const SIGN_BYTES: usize = 8;

/// Returns the bucket where the search for a sign starts; `mixed` is its [`mix`].
///
/// It depends on the low half only, because the high bits are nearly equal within a partition.
#[inline]
pub(crate) fn home_of(mixed: u64, num_buckets: u32) -> u32 {
    ((u64::from(mixed as u32) * u64::from(num_buckets)) >> 32) as u32
}

/// Returns the bucket that is `steps` after the home bucket, with fewer steps than buckets.
#[inline]
pub(crate) fn after(home: u32, steps: u32, num_buckets: u32) -> u32 {
    let to_end = num_buckets - home.min(num_buckets);
    if steps < to_end { home + steps } else { steps - to_end }
}

/// Returns the tag of a sign: bits that determine neither its home bucket nor, up to 65,536 partitions, its partition.
#[inline]
pub(crate) fn tag_of(mixed: u64) -> u16 {
    (mixed >> 32) as u16
}

/// Returns a bit for each slot with the tag; the sign may be in these slots.
#[inline(always)]
pub(crate) fn candidates<C: Compare>(bucket: &Bucket, tag: u16) -> u32 {
    C::pairs(bucket, tag) & ((1 << (tail(bucket) >> 16 & 31)) - 1)
}

/// Whether searches continue in the next bucket.
#[inline(always)]
pub(crate) fn overflowed(bucket: &Bucket) -> bool {
    (tail(bucket) >> 24) as u8 & OVERFLOWED != 0
}

/// Returns the row of the first slot.
#[inline(always)]
pub(crate) fn first_row(bucket: &Bucket) -> u32 {
    (tail(bucket) >> 32) as u32
}

/// Returns the last tag, count, flags and first row in one word.
#[inline(always)]
fn tail(bucket: &Bucket) -> u64 {
    u64::from_le_bytes(bucket.as_chunks().0[BUCKET_BYTES / 8 - 1])
}

/// Returns the sign of a record.
#[inline(always)]
pub(crate) fn sign_of(record: &[u8]) -> u64 {
    record.first_chunk().map_or(0, |sign| u64::from_le_bytes(*sign))
}

/// Checks an index from an untrusted file: its rows are these records without gaps, and every sign is in its partition and
/// can be found. Returns the longest distance of a sign from its home bucket.
pub(crate) fn check<'a>(
    buckets: &[Bucket],
    mut records: impl ExactSizeIterator<Item = &'a [u8]>,
    partition: u32,
    num_partitions: u32,
) -> Result<u32, String> {
    let (num_buckets, num_rows) = (buckets.len() as u32, records.len());
    // Number of consecutive overflowed buckets before this one: the longest distance of a sign here from its home.
    let mut run = buckets.iter().rev().take_while(|bucket| overflowed(bucket)).count() as u32;
    let mut max_steps = 0;
    for (at, bucket) in (0_u32..).zip(buckets) {
        let count = usize::from(bucket[COUNT_AT]);
        if count > SLOTS || bucket[FLAGS_AT] > OVERFLOWED {
            return Err(format!("bucket {at}: invalid count or flags"));
        }
        let next_row = num_rows - records.len();
        if count > 0 && first_row(bucket) as usize != next_row {
            return Err(format!("bucket {at}: expected first row {next_row}, got {}", first_row(bucket)));
        }
        for tag in &bucket.as_chunks().0[..count] {
            let Some(record) = records.next() else {
                return Err(format!("bucket {at}: expected {num_rows} rows, got more in the index"));
            };
            let sign = sign_of(record);
            let mixed = mix(sign);
            if partition_of_mixed(mixed, num_partitions) != partition {
                return Err(format!("bucket {at}: sign {sign} belongs to another partition"));
            }
            let home = home_of(mixed, num_buckets);
            let steps = if at >= home { at - home } else { at + (num_buckets - home) };
            if steps > run || tag_of(mixed) != u16::from_le_bytes(*tag) {
                return Err(format!("bucket {at}: sign {sign} cannot be found from its bucket {home}"));
            }
            max_steps = max_steps.max(steps);
        }
        run = if overflowed(bucket) { run.saturating_add(1) } else { 0 };
    }
    if records.len() > 0 {
        return Err(format!("expected {num_rows} rows, got {} in the index", num_rows - records.len()));
    }
    Ok(max_steps)
}

/// Assigns the signs of a partition to buckets, in linear time; reused from partition to partition.
#[derive(Default)]
pub(crate) struct IndexBuilder {
    homes: Vec<u32>,
    /// End of each bucket's group in `grouped`.
    ends: Vec<u32>,
    /// Positions in the caller's list, grouped by home bucket.
    grouped: Vec<u32>,
    /// Positions that wait for a bucket with a free slot.
    waiting: VecDeque<u32>,
    /// Positions in the order of the rows.
    order: Vec<u32>,
    /// Number of used slots of each bucket, and whether it overflowed.
    fill: Vec<(u8, bool)>,
}

impl IndexBuilder {
    /// Assigns all signs; [`buckets`](IndexBuilder::buckets) and [`order`](IndexBuilder::order) return the result.
    pub(crate) fn build(&mut self, signs: &[u64], partition: u32, num_partitions: u32) -> Result<(), CubeError> {
        if u32::try_from(signs.len()).is_err() {
            return Err(CubeError::TooManyRows { partition, got: signs.len() });
        }
        let num_buckets = num_buckets_for(signs.len());
        self.group_by_home(signs, num_buckets, partition, num_partitions)?;
        self.reject_duplicates(signs, partition)?;
        self.assign(num_buckets as usize);
        Ok(())
    }

    /// Number of buckets.
    pub(crate) fn num_buckets(&self) -> usize {
        self.fill.len()
    }

    /// Iterates over the buckets of the index.
    pub(crate) fn buckets(&self, signs: &[u64]) -> impl Iterator<Item = Bucket> {
        let mut first_row = 0;
        self.fill.iter().map(move |(count, overflowed)| {
            let mut bucket = [0; BUCKET_BYTES];
            let positions = &self.order[first_row..first_row + usize::from(*count)];
            for (slot, position) in bucket.as_chunks_mut().0.iter_mut().zip(positions) {
                *slot = tag_of(mix(signs[*position as usize])).to_le_bytes();
            }
            bucket[COUNT_AT] = *count;
            bucket[FLAGS_AT] = u8::from(*overflowed);
            bucket[FIRST_ROW_AT..].copy_from_slice(&(first_row as u32).to_le_bytes());
            first_row += usize::from(*count);
            bucket
        })
    }

    /// Iterates over positions in the caller's list, in the order of the rows.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> {
        self.order.iter().map(|position| *position as usize)
    }

    /// Groups positions by home bucket with a counting sort.
    fn group_by_home(
        &mut self,
        signs: &[u64],
        num_buckets: u32,
        partition: u32,
        num_partitions: u32,
    ) -> Result<(), CubeError> {
        self.ends.clear();
        self.ends.resize(num_buckets as usize, 0);
        self.homes.clear();
        for sign in signs {
            let mixed = mix(*sign);
            let owner = partition_of_mixed(mixed, num_partitions);
            if owner != partition {
                return Err(CubeError::ForeignSign { partition, sign: *sign, home: owner });
            }
            let home = home_of(mixed, num_buckets);
            self.ends[home as usize] += 1;
            self.homes.push(home);
        }
        let mut start = 0;
        for end in &mut self.ends {
            let count = *end;
            *end = start;
            start += count;
        }
        self.grouped.clear();
        self.grouped.resize(signs.len(), 0);
        for (position, home) in (0_u32..).zip(&self.homes) {
            // Each start moves up by its count and so becomes the end.
            let end = &mut self.ends[*home as usize];
            self.grouped[*end as usize] = position;
            *end += 1;
        }
        Ok(())
    }

    /// Rejects repeated signs. Equal signs have the same home bucket, so only groups are searched.
    fn reject_duplicates(&self, signs: &[u64], partition: u32) -> Result<(), CubeError> {
        let sign_of = |position: &u32| signs[*position as usize];
        let mut start = 0;
        for end in &self.ends {
            let group = &self.grouped[start as usize..*end as usize];
            start = *end;
            let twice = if group.len() <= 2 * SLOTS {
                let mut rest = group.iter().enumerate();
                rest.find(|(i, a)| group[..*i].iter().any(|b| sign_of(a) == sign_of(b))).map(|(_, a)| sign_of(a))
            } else {
                let mut sorted: Vec<u64> = group.iter().map(sign_of).collect();
                sorted.sort_unstable();
                sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
            };
            if let Some(sign) = twice {
                return Err(CubeError::DuplicateSign { partition, sign });
            }
        }
        Ok(())
    }

    /// Fills the buckets in one sweep: first with signs at home, which are found with one cache line, then with waiting signs,
    /// the oldest first, which keeps the longest search short.
    fn assign(&mut self, num_buckets: usize) {
        self.order.clear();
        self.fill.clear();
        self.fill.resize(num_buckets, (0, false));
        let first = self.first_without_carry();
        let mut num_before_end = 0;
        for at in (first..num_buckets).chain(0..first) {
            if at == 0 {
                num_before_end = self.order.len();
            }
            let start = if at == 0 { 0 } else { self.ends[at - 1] };
            let group = &self.grouped[start as usize..self.ends[at] as usize];
            let (at_home, over) = group.split_at(group.len().min(SLOTS));
            let num_waiting = self.waiting.len().min(SLOTS - at_home.len());
            self.order.extend(at_home);
            self.order.extend(self.waiting.drain(..num_waiting));
            self.waiting.extend(over);
            self.fill[at] = ((at_home.len() + num_waiting) as u8, !self.waiting.is_empty());
        }
        self.order.rotate_left(num_before_end);
    }

    /// Returns a bucket that receives no overflow from the previous bucket, so that a sweep from it ends with no waiting signs.
    /// It follows the minimum of the running sum of signs minus slots.
    fn first_without_carry(&self) -> usize {
        let mut lowest = (0, 0);
        for (at, end) in self.ends.iter().enumerate() {
            let surplus = i64::from(*end) - (SLOTS * (at + 1)) as i64;
            if surplus < lowest.0 {
                lowest = (surplus, at + 1);
            }
        }
        if lowest.1 == self.ends.len() { 0 } else { lowest.1 }
    }
}

/// Returns the number of buckets for about 22 signs each: fuller buckets would save little and lengthen searches.
pub(crate) fn num_buckets_for(num_rows: usize) -> u32 {
    num_rows.div_ceil(SLOTS).max(num_rows / 22) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Scalar;

    /// The figures in `docs/formats/cube.md`, for one of 256 partitions of 10 million rows.
    #[test]
    fn a_usual_partition_is_small_and_its_signs_are_mostly_at_home() {
        let signs: Vec<u64> = (0..39_062).collect();
        let mut builder = IndexBuilder::default();
        builder.build(&signs, 0, 1).unwrap();
        let buckets: Vec<Bucket> = builder.buckets(&signs).collect();
        let bytes_per_sign = SIGN_BYTES as f64 + (buckets.len() * BUCKET_BYTES) as f64 / signs.len() as f64;
        assert!(bytes_per_sign < 10.92, "{bytes_per_sign}");

        let home = |sign: &u64| &buckets[home_of(mix(*sign), buckets.len() as u32) as usize];
        let share = |signs: &[u64], has_property: &dyn Fn(&u64) -> bool| {
            signs.iter().filter(|sign| has_property(sign)).count() as f64 / signs.len() as f64
        };
        let has_tag = |sign: &u64| candidates::<Scalar>(home(sign), tag_of(mix(*sign))) != 0;
        let at_home = share(&signs, &has_tag);
        let absent: Vec<u64> = (1_000_000..2_000_000).collect();
        let continued = share(&absent, &|sign| overflowed(home(sign)));
        let false_candidates = share(&absent, &has_tag);
        let records: Vec<[u8; 8]> = builder.order().map(|position| signs[position].to_le_bytes()).collect();
        let max_steps = check(&buckets, records.iter().map(|record| &record[..]), 0, 1).unwrap();
        // The values are 0.992, 0.067, 0.0003 and 4.
        assert!(at_home > 0.99 && continued < 0.1, "{at_home} at home, {continued} of absent signs continue");
        assert!(
            false_candidates < 0.0005 && max_steps < 8,
            "{false_candidates} of absent signs have a candidate, {max_steps} steps"
        );
    }

    #[test]
    fn small_partitions_have_few_buckets() {
        for (num_rows, expected) in [(0, 0), (1, 1), (29, 1), (30, 2), (58, 2), (59, 3), (110, 5), (2200, 100)] {
            assert_eq!(num_buckets_for(num_rows), expected, "{num_rows} rows");
        }
    }
}
