//! Cube files to rows: the lookup that every served request goes through.

use std::path::PathBuf;

use elasticrec_table::part::{Kind, PartFile};
use elasticrec_table::partition::{mix, partition_of_mixed};
use elasticrec_table::prefetch::prefetch_read;

use crate::index::{self, Answer, BUCKET_BYTES, Bucket};
use crate::meta::Meta;
use crate::{Column, CubeError};

/// Keys between the request of a cache line and its use: enough to hide the memory behind the other keys,
/// few enough for the lines a core can have on the way.
const AHEAD: usize = 16;
/// Keys outside their home bucket that are collected before they are looked up together.
const MAX_LATE: usize = 32;
/// Lines of a row asked for ahead; the hardware follows a longer one by itself.
const ROW_LINES_AHEAD: usize = 8;

/// A whole table, read-only, mapped from one or more part files.
pub struct Cube {
    parts: Vec<PartFile>,
    meta: Meta,
    partitions: Vec<Partition>,
    num_rows: u64,
}

/// Where a partition lies; 32 bytes, so that those of a usual table stay in the first-level cache.
#[derive(Clone, Copy)]
struct Partition {
    part: u32,
    num_buckets: u32,
    /// Buckets beyond its home where a sign may lie.
    max_steps: u32,
    index_offset: usize,
    rows_offset: usize,
}

/// A search that waits for a bucket.
#[derive(Clone, Copy)]
struct Probe<'a> {
    partition: &'a Partition,
    buckets: &'a [Bucket],
    at: u32,
}

/// Where a search stands after its home bucket.
#[derive(Clone, Copy)]
enum Found<'a> {
    Row(&'a [u8]),
    Absent,
    /// The next bucket, asked for already, has to be searched.
    Late(Probe<'a>),
}

impl Cube {
    /// Opens part files that together hold every partition once, and reads them through to check them.
    pub fn open(paths: &[PathBuf]) -> Result<Cube, CubeError> {
        Cube::from_parts(paths.iter().map(PartFile::open).collect::<Result<_, _>>()?)
    }

    /// [`open`](Cube::open) for part files that are open already.
    pub fn from_parts(parts: Vec<PartFile>) -> Result<Cube, CubeError> {
        let meta = common_meta(&parts)?;
        let num_partitions = check_directory(&parts)?;
        let mut partitions: Vec<Option<Partition>> = vec![None; num_partitions as usize];
        let mut num_rows = 0;
        for (part, file) in (0_u32..).zip(&parts) {
            for (i, entry) in file.entries().iter().enumerate() {
                file.verify_block(i)?;
                let partition = Partition::check(file, i, part, meta.row_bytes())?;
                partitions[entry.partition as usize] = Some(partition);
                num_rows += entry.num_rows;
            }
        }
        // `check_directory` saw every partition once
        let partitions = partitions.into_iter().flatten().collect();
        Ok(Cube { parts, meta, partitions, num_rows })
    }

    /// Copies the rows of `signs` to `out`, one after the other; a sign that is absent reads as zero.
    /// Returns how many are present.
    ///
    /// # Panics
    /// If `out` is not `signs.len() * width()` long.
    pub fn lookup(&self, signs: &[u64], out: &mut [f32]) -> usize {
        assert_eq!(out.len(), signs.len() * self.width(), "out has to hold a row for each sign");
        let mut hits = 0;
        let mut probes = [self.start(0); AHEAD];
        let mut found = [Found::Absent; AHEAD];
        let mut late: [(usize, Found); MAX_LATE] = [(0, Found::Absent); MAX_LATE];
        let mut num_late = 0;
        // three steps a key, each AHEAD keys behind the one before: ask for the bucket; search it and ask
        // for the row; copy the row
        for step in 0..signs.len() + 2 * AHEAD {
            let lane = step % AHEAD;
            if step >= 2 * AHEAD {
                let i = step - 2 * AHEAD;
                match found[lane] {
                    Found::Late(_) => {
                        late[num_late] = (i, found[lane]);
                        num_late += 1;
                    }
                    done => hits += usize::from(self.copy(done, i, out)),
                }
                if num_late == MAX_LATE {
                    hits += self.finish_late(&mut late, signs, out);
                    num_late = 0;
                }
            }
            if step >= AHEAD
                && let Some(sign) = signs.get(step - AHEAD)
            {
                found[lane] = self.search_home(probes[lane], *sign);
            }
            if let Some(sign) = signs.get(step) {
                probes[lane] = self.start(*sign);
                prefetch_bucket(&probes[lane]);
            }
        }
        hits + self.finish_late(&mut late[..num_late], signs, out)
    }

    /// Whether the cube has a row for `sign`.
    pub fn contains(&self, sign: u64) -> bool {
        self.search(self.start(sign), sign).is_some()
    }

    /// All signs with their rows, in the order of the files' partitions.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Vec<f32>)> {
        self.partitions.iter().flat_map(move |partition| {
            let signs = index::signs(self.buckets(partition));
            (0_u32..).zip(signs).filter_map(move |(number, sign)| {
                let mut values = vec![0.0; self.width()];
                copy_row(self.row(partition, number)?, &mut values);
                Some((sign, values))
            })
        })
    }

    /// Rows in all partitions.
    pub fn num_rows(&self) -> u64 {
        self.num_rows
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.meta.width()
    }

    /// What a row is made of.
    pub fn columns(&self) -> &[Column] {
        &self.meta.columns
    }

    /// Partitions of the table.
    pub fn num_partitions(&self) -> u32 {
        self.partitions.len() as u32
    }

    /// Size of all part files.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes().len() as u64).sum()
    }

    #[inline]
    fn start(&self, sign: u64) -> Probe<'_> {
        let mixed = mix(sign);
        let partition = &self.partitions[partition_of_mixed(mixed, self.num_partitions()) as usize];
        let at = index::home_of(mixed, partition.num_buckets);
        Probe { partition, buckets: self.buckets(partition), at }
    }

    /// Searches the home bucket and asks for the memory that comes next.
    #[inline]
    fn search_home<'a>(&'a self, probe: Probe<'a>, sign: u64) -> Found<'a> {
        let Some(bucket) = probe.buckets.get(probe.at as usize) else {
            return Found::Absent;
        };
        match index::ask(bucket, sign) {
            Answer::Row(number) => self.row(probe.partition, number).map_or(Found::Absent, |row| {
                prefetch_row(row);
                Found::Row(row)
            }),
            Answer::Absent => Found::Absent,
            Answer::Further => {
                let next = Probe { at: index::next_of(probe.at as usize, probe.buckets.len()) as u32, ..probe };
                prefetch_bucket(&next);
                Found::Late(next)
            }
        }
    }

    /// The keys that are not in their home bucket, all at once, so that their waits overlap too.
    fn finish_late<'a>(&'a self, late: &mut [(usize, Found<'a>)], signs: &[u64], out: &mut [f32]) -> usize {
        for (i, found) in &mut *late {
            if let Found::Late(probe) = *found {
                *found = self.search(probe, signs[*i]).map_or(Found::Absent, |row| {
                    prefetch_row(row);
                    Found::Row(row)
                });
            }
        }
        late.iter().filter(|(i, found)| self.copy(*found, *i, out)).count()
    }

    #[inline]
    fn search(&self, probe: Probe<'_>, sign: u64) -> Option<&[u8]> {
        let num_steps = probe.partition.max_steps.saturating_add(1);
        let number = index::find(probe.buckets, probe.at, num_steps, sign)?;
        self.row(probe.partition, number)
    }

    /// Writes row `i` of the answer; says whether the sign is present.
    #[inline]
    fn copy(&self, found: Found<'_>, i: usize, out: &mut [f32]) -> bool {
        let out = &mut out[i * self.width()..][..self.width()];
        if let Found::Row(row) = found {
            copy_row(row, out);
            return true;
        }
        out.fill(0.0);
        false
    }

    #[inline]
    fn buckets(&self, partition: &Partition) -> &[Bucket] {
        let bytes = &self.parts[partition.part as usize].bytes()[partition.index_offset..partition.rows_offset];
        bytes.as_chunks().0
    }

    #[inline]
    fn row(&self, partition: &Partition, number: u32) -> Option<&[u8]> {
        let row_bytes = self.meta.row_bytes();
        let start = partition.rows_offset + number as usize * row_bytes;
        self.parts[partition.part as usize].bytes().get(start..start + row_bytes)
    }
}

impl Partition {
    fn check(file: &PartFile, i: usize, part: u32, row_bytes: usize) -> Result<Partition, CubeError> {
        let entry = file.entries()[i];
        let wrong = |what| CubeError::Block { name: file.name().to_owned(), partition: entry.partition, what };
        let [num_buckets, reserved] = entry.aux;
        let index_bytes = num_buckets.checked_mul(BUCKET_BYTES as u64);
        let rows_bytes = entry.num_rows.checked_mul(row_bytes as u64);
        let expected = index_bytes.zip(rows_bytes).and_then(|(index, rows)| index.checked_add(rows));
        let narrow = u32::try_from(num_buckets).ok().filter(|_| entry.num_rows <= u64::from(u32::MAX));
        let (Some(num_buckets), true) = (narrow, expected == Some(entry.length) && reserved == 0) else {
            let num_rows = entry.num_rows;
            let length = entry.length;
            return Err(wrong(format!("{num_buckets} buckets and {num_rows} rows do not make {length} bytes")));
        };
        let (index, _) = file.block(i).split_at(num_buckets as usize * BUCKET_BYTES);
        let max_steps = index::check(index.as_chunks().0, entry.num_rows, entry.partition, file.num_partitions());
        let index_offset = entry.offset as usize;
        Ok(Partition {
            part,
            num_buckets,
            max_steps: max_steps.map_err(wrong)?,
            index_offset,
            rows_offset: index_offset + index.len(),
        })
    }
}

/// What all parts say of their rows; they have to say the same.
fn common_meta(parts: &[PartFile]) -> Result<Meta, CubeError> {
    let Some(first) = parts.first() else {
        return Err(CubeError::NoParts);
    };
    first.expect_kind(Kind::Cube)?;
    let meta = Meta::parse(first.name(), first.meta())?;
    for part in &parts[1..] {
        part.expect_kind(Kind::Cube)?;
        let differs = |what| CubeError::Differs { name: part.name().to_owned(), first: first.name().to_owned(), what };
        if Meta::parse(part.name(), part.meta())? != meta {
            return Err(differs("other columns"));
        }
        if part.num_partitions() != first.num_partitions() {
            return Err(differs("another number of partitions"));
        }
    }
    Ok(meta)
}

/// Checks that the parts hold every partition once, and returns their number.
fn check_directory(parts: &[PartFile]) -> Result<u32, CubeError> {
    let num_partitions = parts.first().map_or(0, PartFile::num_partitions);
    let mut owners: Vec<(u32, &PartFile)> = Vec::new();
    for part in parts {
        owners.extend(part.entries().iter().map(|entry| (entry.partition, part)));
    }
    owners.sort_by_key(|(partition, _)| *partition);
    if let Some(pair) = owners.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let [(partition, first), (_, second)] = [pair[0], pair[1]];
        return Err(CubeError::Doubled { name: second.name().to_owned(), first: first.name().to_owned(), partition });
    }
    // each is below `num_partitions` and there once, so the number tells whether all are
    let missing = num_partitions - owners.len() as u32;
    if missing == 0 {
        return Ok(num_partitions);
    }
    let is_there = |partition: &u32| owners.binary_search_by_key(partition, |(owned, _)| *owned).is_ok();
    let absent = (0..num_partitions).filter(|partition| !is_there(partition));
    let mut first: Vec<String> = absent.take(8).map(|partition| partition.to_string()).collect();
    if missing > 8 {
        first.push("…".to_owned());
    }
    Err(CubeError::Missing { num_files: parts.len(), num_partitions, missing, first: first.join(", ") })
}

#[inline]
fn prefetch_row(row: &[u8]) {
    for line in row.chunks(64).take(ROW_LINES_AHEAD) {
        prefetch_read(line.as_ptr());
    }
    // a packed row starts anywhere in a line, and so may touch one more
    if let Some(last) = row.last() {
        prefetch_read(last);
    }
}

#[inline]
fn prefetch_bucket(probe: &Probe<'_>) {
    if let Some(bucket) = probe.buckets.get(probe.at as usize) {
        prefetch_read(bucket);
    }
}

#[inline]
fn copy_row(row: &[u8], out: &mut [f32]) {
    for (value, four) in out.iter_mut().zip(row.as_chunks().0) {
        *value = f32::from_le_bytes(*four);
    }
}
