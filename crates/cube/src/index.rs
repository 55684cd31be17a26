//! The index of a partition: sign to row number, through buckets of one cache line.

use std::collections::VecDeque;

use elasticrec_table::partition::{mix, partition_of_mixed};

use crate::CubeError;

/// A bucket is a cache line: seven signs, the row of the first, how many are used, and flags.
pub(crate) const BUCKET_BYTES: usize = 64;
pub(crate) const SLOTS: usize = 7;
const FIRST_ROW_AT: usize = 56;
const COUNT_AT: usize = 60;
const FLAGS_AT: usize = 61;
/// In the buckets of segments: a bit for each slot whose sign was removed, and has no row.
const REMOVED_AT: usize = 62;
/// A sign that belongs here, or came past, lies further on.
const OVERFLOWED: u8 = 1;

pub(crate) type Bucket = [u8; BUCKET_BYTES];

/// The bucket where the search for a sign starts; `mixed` is its [`mix`].
///
/// The low half only: the high bits chose the partition and are nearly equal inside one.
#[inline]
pub(crate) fn home_of(mixed: u64, num_buckets: u32) -> u32 {
    ((u64::from(mixed as u32) * u64::from(num_buckets)) >> 32) as u32
}

/// What one bucket says about a sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Row(u32),
    Absent,
    /// Not here, but perhaps in the next bucket.
    Further,
}

/// How a sign is compared with those of a bucket.
pub(crate) trait Compare {
    /// A bit for each slot that has the sign; slots that are not used may have one too.
    fn equal(bucket: &Bucket, sign: u64) -> u32;

    /// A bit for the slot that has the sign, if one has.
    #[inline(always)]
    fn found(bucket: &Bucket, sign: u64) -> u32 {
        Self::equal(bucket, sign) & ((1 << (tail(bucket) >> 32 & 7)) - 1)
    }

    /// The slot of a sign in a bucket.
    #[inline(always)]
    fn slot_of(bucket: &Bucket, sign: u64) -> Option<usize> {
        let found = Self::found(bucket, sign);
        (found != 0).then(|| found.trailing_zeros() as usize)
    }

    /// What the bucket of a cube says about a sign.
    #[inline(always)]
    fn ask(bucket: &Bucket, sign: u64) -> Answer {
        match Self::slot_of(bucket, sign) {
            Some(slot) => Answer::Row(first_row(bucket) + slot as u32),
            None if overflowed(bucket) => Answer::Further,
            None => Answer::Absent,
        }
    }
}

/// One after the other.
pub(crate) struct Plain;

impl Compare for Plain {
    #[inline(always)]
    fn equal(bucket: &Bucket, sign: u64) -> u32 {
        // no early exit: seven compares cost less than one branch that guesses wrong
        (0..SLOTS).fold(0, |found, slot| found | u32::from(sign_at(bucket, slot) == sign) << slot)
    }
}

/// Four at a time. Only for code that runs where there is AVX2.
#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
pub(crate) struct Avx2;

#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
impl Compare for Avx2 {
    #[inline(always)]
    fn equal(bucket: &Bucket, sign: u64) -> u32 {
        // SAFETY: whoever names this type has seen that the processor has AVX2.
        unsafe { equal_avx2(bucket, sign) }
    }
}

#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
#[inline]
#[target_feature(enable = "avx2")]
fn equal_avx2(bucket: &Bucket, sign: u64) -> u32 {
    use std::arch::x86_64::{
        __m256i, _mm256_castsi256_pd, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_pd, _mm256_set1_epi64x,
    };
    let sign = _mm256_set1_epi64x(sign as i64);
    let half = |start: usize| {
        let half: *const __m256i = bucket[start..start + BUCKET_BYTES / 2].as_ptr().cast();
        // SAFETY: 32 bytes of the bucket start there, and the load asks for no alignment.
        let half = unsafe { _mm256_loadu_si256(half) };
        _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(half, sign))) as u32
    };
    half(0) | half(BUCKET_BYTES / 2) << 4
}

/// Whether a sign that belongs here, or came past, lies further on.
#[inline]
pub(crate) fn overflowed(bucket: &Bucket) -> bool {
    (tail(bucket) >> 40) as u8 & OVERFLOWED != 0
}

/// The signs in a bucket.
#[inline]
pub(crate) fn count(bucket: &Bucket) -> usize {
    usize::from(bucket[COUNT_AT]).min(SLOTS)
}

/// The row number of a slot of a segment, unless its sign was removed: those have no row.
#[inline]
pub(crate) fn row_of(bucket: &Bucket, slot: usize) -> Option<u32> {
    let removed = u32::from(bucket[REMOVED_AT]);
    let before = (removed & ((1 << slot) - 1)).count_ones();
    (removed >> slot & 1 == 0).then(|| first_row(bucket) + slot as u32 - before)
}

/// Adds a sign to a bucket of a segment that has room; `next_row` is the number of the next row.
#[inline]
pub(crate) fn append(bucket: &mut Bucket, sign: u64, removed: bool, next_row: u32) {
    let slot = count(bucket);
    if slot == 0 {
        bucket[FIRST_ROW_AT..COUNT_AT].copy_from_slice(&next_row.to_le_bytes());
    }
    bucket[8 * slot..][..8].copy_from_slice(&sign.to_le_bytes());
    bucket[COUNT_AT] += 1;
    bucket[REMOVED_AT] |= u8::from(removed) << slot;
}

/// Marks a bucket: searches go on from it.
#[inline]
pub(crate) fn set_overflowed(bucket: &mut Bucket) {
    bucket[FLAGS_AT] |= OVERFLOWED;
}

/// The signs of an index in the order of their rows.
pub(crate) fn signs(buckets: &[Bucket]) -> impl Iterator<Item = u64> {
    buckets.iter().flat_map(|bucket| (0..usize::from(bucket[COUNT_AT]).min(SLOTS)).map(|slot| sign_at(bucket, slot)))
}

/// Checks an index that may be crafted: rows are numbered without a gap, and every sign is in its
/// partition and where a search finds it. Returns how many buckets beyond its home a search may have to go.
pub(crate) fn check(buckets: &[Bucket], num_rows: u64, partition: u32, num_partitions: u32) -> Result<u32, String> {
    let num_buckets = buckets.len() as u32;
    // overflowed buckets in a row just before this one: how far from its home a sign may lie here
    let mut run = buckets.iter().rev().take_while(|bucket| overflowed(bucket)).count() as u32;
    let mut next_row = 0_u64;
    let mut max_steps = 0;
    for (at, bucket) in (0_u32..).zip(buckets) {
        let count = usize::from(bucket[COUNT_AT]);
        if count > SLOTS || bucket[FLAGS_AT] > OVERFLOWED || bucket[FLAGS_AT + 1..] != [0, 0] {
            return Err(format!("bucket {at}: count or flags are not valid"));
        }
        if count > 0 && u64::from(first_row(bucket)) != next_row {
            return Err(format!("bucket {at}: expected first row {next_row}, got {}", first_row(bucket)));
        }
        next_row += count as u64;
        for slot in 0..count {
            let sign = sign_at(bucket, slot);
            let mixed = mix(sign);
            if partition_of_mixed(mixed, num_partitions) != partition {
                return Err(format!("bucket {at}: sign {sign} belongs to another partition"));
            }
            let home = home_of(mixed, num_buckets);
            let steps = if at >= home { at - home } else { at + (num_buckets - home) };
            if steps > run {
                return Err(format!("bucket {at}: sign {sign} cannot be found from its bucket {home}"));
            }
            max_steps = max_steps.max(steps);
        }
        run = if overflowed(bucket) { run.saturating_add(1) } else { 0 };
    }
    if next_row != num_rows {
        return Err(format!("expected {num_rows} rows, got {next_row} in the index"));
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
    /// What each bucket holds: positions in the caller's list.
    slots: Vec<[u32; SLOTS]>,
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
        let mut first_row = 0_u32;
        self.fill.iter().zip(&self.slots).map(move |((count, overflowed), slots)| {
            let mut bucket = [0; BUCKET_BYTES];
            for (slot, position) in slots[..usize::from(*count)].iter().enumerate() {
                bucket[8 * slot..][..8].copy_from_slice(&signs[*position as usize].to_le_bytes());
            }
            bucket[FIRST_ROW_AT..COUNT_AT].copy_from_slice(&first_row.to_le_bytes());
            bucket[COUNT_AT] = *count;
            bucket[FLAGS_AT] = u8::from(*overflowed);
            first_row += u32::from(*count);
            bucket
        })
    }

    /// Positions in the caller's list, in the order of their rows.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> {
        let used = self.fill.iter().zip(&self.slots).flat_map(|((count, _), slots)| &slots[..usize::from(*count)]);
        used.map(|position| *position as usize)
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
        self.slots.clear();
        self.slots.resize(num_buckets, [0; SLOTS]);
        self.fill.clear();
        self.fill.resize(num_buckets, (0, false));
        let first = self.first_without_carry();
        for at in (first..num_buckets).chain(0..first) {
            let start = if at == 0 { 0 } else { self.ends[at - 1] };
            let group = &self.grouped[start as usize..self.ends[at] as usize];
            let (at_home, over) = group.split_at(group.len().min(SLOTS));
            let slots = &mut self.slots[at];
            slots[..at_home.len()].copy_from_slice(at_home);
            let mut count = at_home.len();
            while count < SLOTS
                && let Some(position) = self.waiting.pop_front()
            {
                slots[count] = position;
                count += 1;
            }
            self.waiting.extend(over);
            self.fill[at] = (count as u8, !self.waiting.is_empty());
        }
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

/// 5.5 signs a bucket: 11.6 bytes a sign, and 93 of 100 in their home bucket.
fn num_buckets_for(num_rows: usize) -> u32 {
    num_rows.div_ceil(SLOTS).max(2 * num_rows / 11) as u32
}

#[inline]
pub(crate) fn sign_at(bucket: &Bucket, slot: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bucket[8 * slot + i]))
}

#[inline]
pub(crate) fn first_row(bucket: &Bucket) -> u32 {
    tail(bucket) as u32
}

/// What stands behind the signs, in one word: first row, count, flags.
#[inline(always)]
fn tail(bucket: &Bucket) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bucket[FIRST_ROW_AT + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `docs/formats/cube.md` promises of a usual partition: 10 million rows over 256.
    #[test]
    fn a_usual_partition_is_small_and_mostly_at_home() {
        let signs: Vec<u64> = (0..39_062).collect();
        let mut builder = IndexBuilder::default();
        builder.build(&signs, 0, 1).unwrap();
        let buckets: Vec<Bucket> = builder.buckets(&signs).collect();
        let bytes_per_sign = (buckets.len() * BUCKET_BYTES) as f64 / signs.len() as f64;
        assert!(bytes_per_sign < 11.65, "{bytes_per_sign}");

        let home = |sign: &u64| home_of(mix(*sign), buckets.len() as u32);
        let is_at_home = |sign: &&u64| matches!(Plain::ask(&buckets[home(sign) as usize], **sign), Answer::Row(_));
        let at_home = signs.iter().filter(is_at_home).count() as f64 / signs.len() as f64;
        let absent: Vec<u64> = (1_000_000..1_039_062).collect();
        let ends_at_home = |sign: &&u64| Plain::ask(&buckets[home(sign) as usize], **sign) == Answer::Absent;
        let absent_at_home = absent.iter().filter(ends_at_home).count() as f64 / absent.len() as f64;
        let max_steps = check(&buckets, signs.len() as u64, 0, 1).unwrap();
        // 0.926 and 0.690: a search for an absent sign goes on wherever a bucket overflowed
        let one_line = 0.95 * at_home + 0.05 * absent_at_home;
        assert!(at_home > 0.92 && one_line > 0.9, "{at_home} at home, {absent_at_home} of the absent");
        assert!(max_steps < 64, "{max_steps}");
    }

    #[test]
    fn small_partitions_waste_little() {
        for (num_rows, expected) in [(0, 0), (1, 1), (7, 1), (8, 2), (14, 2), (15, 3), (22, 4), (110, 20)] {
            assert_eq!(num_buckets_for(num_rows), expected, "{num_rows} rows");
        }
    }
}
