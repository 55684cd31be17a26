//! The versions that a server holds in memory. A request takes a version and keeps it until it is answered.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_wire::lock;
use thiserror::Error;

use crate::error::list;
use crate::{CubeError, DeltaFile, View};

/// Time to wait for the readers of a retired version: longer than any request, shorter than some merges.
const RETIRE_WAIT: Duration = Duration::from_millis(50);
/// With more segments than this, a delta is applied only after a merge.
const MAX_SEGMENTS: usize = 48;

/// The reason a version cannot be installed or read.
#[derive(Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum VersionError {
    #[error("version {version}: already held")]
    AlreadyHeld { version: u64 },
    #[error("version {version}: not held by this server, held: {}", list(.held))]
    NoVersion { version: u64, held: Vec<u64> },
    #[error(
        "version {version}: expected partitions {} to {} of {num_partitions}, got {} to {} of {got_partitions}",
        .range.start, .range.end, .got.start, .got.end
    )]
    Partitions { version: u64, range: Range<u32>, num_partitions: u32, got: Range<u32>, got_partitions: u32 },
}

/// Versions of the same partitions, by number.
pub struct VersionSet {
    range: Range<u32>,
    num_partitions: u32,
    /// The versions in ascending order. Locked only to find a version and to count one more reader.
    held: RwLock<Vec<(u64, Arc<View>)>>,
    /// Retired and replaced versions that may still have readers.
    retired: Mutex<Vec<Arc<View>>>,
    /// Whether a thread is merging segments.
    is_merging: AtomicBool,
}

impl VersionSet {
    /// Creates an empty set for versions of these partitions.
    pub fn new(range: Range<u32>, num_partitions: u32) -> VersionSet {
        VersionSet {
            range,
            num_partitions,
            held: RwLock::default(),
            retired: Mutex::default(),
            is_merging: AtomicBool::new(false),
        }
    }

    /// The partitions of all versions.
    pub fn partitions(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Partitions of the table.
    pub fn num_partitions(&self) -> u32 {
        self.num_partitions
    }

    /// Adds a version; it can be read from now on.
    pub fn install(&self, version: u64, view: View) -> Result<(), VersionError> {
        if view.partitions() != self.range || view.num_partitions() != self.num_partitions {
            return Err(VersionError::Partitions {
                version,
                range: self.range.clone(),
                num_partitions: self.num_partitions,
                got: view.partitions(),
                got_partitions: view.num_partitions(),
            });
        }
        self.sweep();
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        match held.binary_search_by_key(&version, |(version, _)| *version) {
            Ok(_) => Err(VersionError::AlreadyHeld { version }),
            Err(index) => {
                held.insert(index, (version, Arc::new(view)));
                Ok(())
            }
        }
    }

    /// Applies the parts of a delta to `parent`. The merge of segments is left to
    /// [`start_merge`](VersionSet::start_merge), unless there are too many already.
    pub fn apply_delta(&self, parent: &View, parts: &[DeltaFile]) -> Result<View, CubeError> {
        if parent.num_segments() < MAX_SEGMENTS { parent.stacked(parts) } else { parent.with_delta(parts) }
    }

    /// Starts a thread that merges segments of the newest version, unless one is running.
    pub fn start_merge(self: &Arc<Self>) {
        if self.is_merging.swap(true, Ordering::AcqRel) {
            return;
        }
        let versions = self.clone();
        let merging = move || {
            loop {
                let merged = versions.merge();
                if matches!(merged, Ok(true)) {
                    continue;
                }
                versions.is_merging.store(false, Ordering::Release);
                // A version may have been installed since the merge; a failed merge is retried with the next delta.
                if merged.is_err() || !versions.is_mergeable() || versions.is_merging.swap(true, Ordering::AcqRel) {
                    return;
                }
            }
        };
        if thread::Builder::new().name("cube-merge".into()).spawn(merging).is_err() {
            self.is_merging.store(false, Ordering::Release);
        }
    }

    fn newest(&self) -> Option<Arc<View>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner).last().map(|(_, view)| view.clone())
    }

    fn is_mergeable(&self) -> bool {
        self.newest().is_some_and(|view| view.is_mergeable())
    }

    /// Merges segments of the newest version, in all versions that share them; false if nothing needs a merge.
    fn merge(&self) -> Result<bool, CubeError> {
        let Some(before) = self.newest().filter(|view| view.is_mergeable()) else { return Ok(false) };
        let after = before.merged()?;
        let mut replaced = vec![before.clone()];
        for (_, view) in self.held.write().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            if let Some(merged) = view.with_merged(&before, &after) {
                replaced.push(std::mem::replace(view, Arc::new(merged)));
            }
        }
        drop(before);
        lock(&self.retired).append(&mut replaced);
        self.sweep();
        Ok(true)
    }

    /// Removes a version. Its memory is freed once its last reader is done, and never by a reader.
    pub fn retire(&self, version: u64) -> Result<(), VersionError> {
        let retired = {
            let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
            match held.binary_search_by_key(&version, |(version, _)| *version) {
                Ok(index) => held.remove(index).1,
                Err(_) => return Err(VersionError::NoVersion { version, held: numbers(&held) }),
            }
        };
        let end = Instant::now() + RETIRE_WAIT;
        while Arc::strong_count(&retired) > 1 && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        lock(&self.retired).push(retired);
        self.sweep();
        Ok(())
    }

    /// Returns a version, for one request.
    pub fn get(&self, version: u64) -> Result<Arc<View>, VersionError> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        match held.binary_search_by_key(&version, |(version, _)| *version) {
            Ok(index) => Ok(held[index].1.clone()),
            Err(_) => Err(VersionError::NoVersion { version, held: numbers(&held) }),
        }
    }

    /// Returns all versions in ascending order.
    pub fn all(&self) -> Vec<(u64, Arc<View>)> {
        self.held.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the numbers of all versions in ascending order.
    pub fn numbers(&self) -> Vec<u64> {
        numbers(&self.held.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Frees retired versions without readers; a retired version gets no new readers.
    fn sweep(&self) {
        lock(&self.retired).retain(|view| Arc::strong_count(view) > 1);
    }
}

fn numbers(held: &[(u64, Arc<View>)]) -> Vec<u64> {
    held.iter().map(|(version, _)| *version).collect()
}
