//! The index of a partition: sign to row number, through buckets of one cache line with a tag of each sign.

use std::collections::VecDeque;

use elasticrec_table::partition::{mix, partition_of_mixed};

use crate::CubeError;
use crate::compare::{BUCKET_BYTES, Bucket, Compare};

/// 29 tags, how many of them are used, flags, and the row of the first.
const SLOTS: usize = 29;
const COUNT_AT: usize = 58;
const FLAGS_AT: usize = 59;
const FIRST_ROW_AT: usize = 60;
/// A sign that belongs here, or came past, lies further on.
const OVERFLOWED: u8 = 1;
/// Before each row stands its sign, for tags are short: two make a record.
pub(crate) const SIGN_BYTES: usize = 8;

/// The bucket where the search for a sign starts; `mixed` is its [`mix`].
///
/// The low half only: the high bits chose the partition and are nearly equal inside one.
#[inline]
pub(crate) fn home_of(mixed: u64, num_buckets: u32) -> u32 {
    ((u64::from(mixed as u32) * u64::from(num_buckets)) >> 32) as u32
}

/// The bucket so many steps, fewer than there are buckets, after its home.
#[inline]
pub(crate) fn after(home: u32, steps: u32, num_buckets: u32) -> u32 {
    let to_end = num_buckets - home.min(num_buckets);
    if steps < to_end { home + steps } else { steps - to_end }
}

/// What an index knows of a sign: bits that neither its home nor, up to 65,536 of them, its partition was chosen by.
#[inline]
pub(crate) fn tag_of(mixed: u64) -> u16 {
    (mixed >> 32) as u16
}

/// A bit for each slot that has the tag: the sign may be there.
#[inline(always)]
pub(crate) fn candidates<C: Compare>(bucket: &Bucket, tag: u16) -> u32 {
    C::pairs(bucket, tag) & ((1 << (tail(bucket) >> 16 & 31)) - 1)
}

/// Whether a sign that belongs here, or came past, lies further on.
#[inline(always)]
pub(crate) fn overflowed(bucket: &Bucket) -> bool {
    (tail(bucket) >> 24) as u8 & OVERFLOWED != 0
}

/// The row of the first slot.
#[inline(always)]
pub(crate) fn first_row(bucket: &Bucket) -> u32 {
    (tail(bucket) >> 32) as u32
}

/// The last tag and what stands behind the tags, in one word.
#[inline(always)]
fn tail(bucket: &Bucket) -> u64 {
    u64::from_le_bytes(bucket.as_chunks().0[BUCKET_BYTES / 8 - 1])
}

/// The sign of a record.
#[inline(always)]
pub(crate) fn sign_of(record: &[u8]) -> u64 {
    record.first_chunk().map_or(0, |sign| u64::from_le_bytes(*sign))
}

/// Checks an index that may be crafted: its rows are these records without a gap, and every sign is in its partition and
/// where a search finds it. Returns how many buckets beyond its home a search may have to go.
pub(crate) fn check<'a>(
    buckets: &[Bucket],
    mut records: impl ExactSizeIterator<Item = &'a [u8]>,
    partition: u32,
    num_partitions: u32,
) -> Result<u32, String> {
    let (num_buckets, num_rows) = (buckets.len() as u32, records.len());
    // overflowed buckets in a row just before this one: how far from its home a sign may lie here
    let mut run = buckets.iter().rev().take_while(|bucket| overflowed(bucket)).count() as u32;
    let mut max_steps = 0;
    for (at, bucket) in (0_u32..).zip(buckets) {
        let count = usize::from(bucket[COUNT_AT]);
        if count > SLOTS || bucket[FLAGS_AT] > OVERFLOWED {
            return Err(format!("bucket {at}: count or flags are not valid"));
        }
        let next_row = num_rows - records.len();
        if count > 0 && first_row(bucket) as usize != next_row {
            return Err(format!("bucket {at}: expected first row {next_row}, got {}", first_row(bucket)));
        }
        for tag in &bucket.as_chunks().0[..count] {
            let Some(record) = records.next() else {
                return Err(format!("bucket {at}: more rows in the index than the {num_rows} that there are"));
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

/// Lays a partition's signs out in buckets, in time linear in their number; reused from one to the next.
#[derive(Default)]
pub(crate) struct IndexBuilder {
    homes: Vec<u32>,
    /// End of each bucket's group in `grouped`.
    ends: Vec<u32>,
    /// Positions in the caller's list, grouped by home bucket.
    grouped: Vec<u32>,
    /// Positions that wait for a bucket with room.
    waiting: VecDeque<u32>,
    /// Positions in the order of the rows.
    order: Vec<u32>,
    /// How many of a bucket's slots are used, and whether it overflowed.
    fill: Vec<(u8, bool)>,
}

impl IndexBuilder {
    /// Places all signs; [`buckets`](IndexBuilder::buckets) and [`order`](IndexBuilder::order) give the result.
    pub(crate) fn build(&mut self, signs: &[u64], partition: u32, num_partitions: u32) -> Result<(), CubeError> {
        if u32::try_from(signs.len()).is_err() {
            return Err(CubeError::TooManyRows { partition, got: signs.len() });
        }
        let num_buckets = num_buckets_for(signs.len());
        self.group_by_home(signs, num_buckets, partition, num_partitions)?;
        self.refuse_duplicates(signs, partition)?;
        self.place(num_buckets as usize);
        Ok(())
    }

    /// Buckets of the index that was built.
    pub(crate) fn num_buckets(&self) -> usize {
        self.fill.len()
    }

    /// The index, bucket by bucket.
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

    /// Positions in the caller's list, in the order of their rows.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> {
        self.order.iter().map(|position| *position as usize)
    }

    /// A counting sort by home bucket.
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
            // each start moves up by its count, and so becomes the end
            let end = &mut self.ends[*home as usize];
            self.grouped[*end as usize] = position;
            *end += 1;
        }
        Ok(())
    }

    /// Equal signs have one home, so only groups have to be searched.
    fn refuse_duplicates(&self, signs: &[u64], partition: u32) -> Result<(), CubeError> {
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

    /// One sweep over the buckets: those at home first, because they are found with one cache line, then
    /// those that wait, the oldest first, because that keeps the longest way short.
    fn place(&mut self, num_buckets: usize) {
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

    /// The bucket into which nothing flows from the one before, so that a sweep from there closes the
    /// circle with nothing left: it follows the lowest point of the running sum of signs less slots.
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

/// 22 signs a bucket: fewer would save little, more would send more searches on.
pub(crate) fn num_buckets_for(num_rows: usize) -> u32 {
    num_rows.div_ceil(SLOTS).max(num_rows / 22) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Plain;

    /// What `docs/formats/cube.md` promises of a usual partition: 10 million rows over 256.
    #[test]
    fn a_usual_partition_is_small_and_mostly_at_home() {
        let signs: Vec<u64> = (0..39_062).collect();
        let mut builder = IndexBuilder::default();
        builder.build(&signs, 0, 1).unwrap();
        let buckets: Vec<Bucket> = builder.buckets(&signs).collect();
        let bytes_per_sign = SIGN_BYTES as f64 + (buckets.len() * BUCKET_BYTES) as f64 / signs.len() as f64;
        assert!(bytes_per_sign < 10.92, "{bytes_per_sign}");

        let home = |sign: &u64| &buckets[home_of(mix(*sign), buckets.len() as u32) as usize];
        let share = |signs: &[u64], is_so: &dyn Fn(&u64) -> bool| {
            signs.iter().filter(|sign| is_so(sign)).count() as f64 / signs.len() as f64
        };
        let has_tag = |sign: &u64| candidates::<Plain>(home(sign), tag_of(mix(*sign))) != 0;
        let at_home = share(&signs, &has_tag);
        let absent: Vec<u64> = (1_000_000..2_000_000).collect();
        let goes_on = share(&absent, &|sign| overflowed(home(sign)));
        let is_mistaken = share(&absent, &has_tag);
        let records: Vec<[u8; 8]> = builder.order().map(|position| signs[position].to_le_bytes()).collect();
        let max_steps = check(&buckets, records.iter().map(|record| &record[..]), 0, 1).unwrap();
        // 0.992, 0.067, 0.0003 and 4
        assert!(at_home > 0.99 && goes_on < 0.1, "{at_home} at home, {goes_on} of the absent");
        assert!(is_mistaken < 0.0005 && max_steps < 8, "{is_mistaken} mistaken, {max_steps} steps");
    }

    #[test]
    fn small_partitions_waste_little() {
        for (num_rows, expected) in [(0, 0), (1, 1), (29, 1), (30, 2), (58, 2), (59, 3), (110, 5), (2200, 100)] {
            assert_eq!(num_buckets_for(num_rows), expected, "{num_rows} rows");
        }
    }
}
