//! The versions that a server holds. A reader takes one for a request and keeps it for as long as it needs it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::{CubeError, DeltaFile, View};

/// A request that has a version is done with it in less; a merge may take longer.
const LEAVE_TIME: Duration = Duration::from_millis(50);
/// With more segments a delta is not taken before they are merged.
const MAX_SEGMENTS: usize = 48;

/// Why a version cannot be installed or taken.
#[derive(Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum VersionError {
    #[error("version {version}: is held already")]
    AlreadyHeld { version: u64 },
    #[error("version {version}: not here, held: {}", list(.held))]
    NoVersion { version: u64, held: Vec<u64> },
    #[error(
        "version {version}: expected partitions {} to {} of {num_partitions}, got {} to {} of {got_partitions}",
        .range.start, .range.end, .got.start, .got.end
    )]
    Partitions { version: u64, range: Range<u32>, num_partitions: u32, got: Range<u32>, got_partitions: u32 },
}

fn list(versions: &[u64]) -> String {
    match versions {
        [] => "none".into(),
        some => some.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// Versions by number, of the same partitions.
pub struct VersionSet {
    range: Range<u32>,
    num_partitions: u32,
    /// Ascending. Locked for as long as it takes to find one and to count a reader more.
    held: RwLock<Vec<(u64, Arc<View>)>>,
    /// Retired and replaced ones that somebody may still read.
    leaving: Mutex<Vec<Arc<View>>>,
    /// A thread merges segments.
    is_merging: AtomicBool,
}

impl VersionSet {
    /// Holds nothing yet; versions have to be of these partitions.
    pub fn new(range: Range<u32>, num_partitions: u32) -> VersionSet {
        VersionSet {
            range,
            num_partitions,
            held: RwLock::default(),
            leaving: Mutex::default(),
            is_merging: AtomicBool::new(false),
        }
    }

    /// The partitions that it is for.
    pub fn partitions(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Of so many.
    pub fn num_partitions(&self) -> u32 {
        self.num_partitions
    }

    /// Makes a version readable from now on.
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
            Err(place) => {
                held.insert(place, (version, Arc::new(view)));
                Ok(())
            }
        }
    }

    /// The version after `parent`, with the parts of a delta: as soon as they are read. Segments are merged behind it.
    pub fn next(&self, parent: &View, parts: &[DeltaFile]) -> Result<View, CubeError> {
        if parent.num_segments() < MAX_SEGMENTS { parent.stacked(parts) } else { parent.with_delta(parts) }
    }

    /// Merges segments of the newest version on a thread of its own, unless one does already.
    pub fn merge_behind(self: &Arc<Self>) {
        if self.is_merging.swap(true, Ordering::AcqRel) {
            return;
        }
        let store = self.clone();
        let merging = move || {
            loop {
                let merged = store.merge();
                if matches!(merged, Ok(true)) {
                    continue;
                }
                store.is_merging.store(false, Ordering::Release);
                // a version may have come between the last look and this; what failed is tried with the next delta
                if merged.is_err() || !store.is_mergeable() || store.is_merging.swap(true, Ordering::AcqRel) {
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

    /// Merges segments of the newest version, for all versions that have them; false if there are none to merge.
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
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner).append(&mut replaced);
        self.sweep();
        Ok(true)
    }

    /// Gives a version up, and its memory once nobody reads it: not at the cost of a reader, and not while one does.
    pub fn retire(&self, version: u64) -> Result<(), VersionError> {
        let retired = {
            let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
            match held.binary_search_by_key(&version, |(version, _)| *version) {
                Ok(place) => held.remove(place).1,
                Err(_) => return Err(VersionError::NoVersion { version, held: numbers(&held) }),
            }
        };
        let end = Instant::now() + LEAVE_TIME;
        while Arc::strong_count(&retired) > 1 && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner).push(retired);
        self.sweep();
        Ok(())
    }

    /// A version, for one request.
    pub fn get(&self, version: u64) -> Result<Arc<View>, VersionError> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        match held.binary_search_by_key(&version, |(version, _)| *version) {
            Ok(place) => Ok(held[place].1.clone()),
            Err(_) => Err(VersionError::NoVersion { version, held: numbers(&held) }),
        }
    }

    /// All versions, ascending.
    pub fn all(&self) -> Vec<(u64, Arc<View>)> {
        self.held.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Their numbers, ascending.
    pub fn versions(&self) -> Vec<u64> {
        numbers(&self.held.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Drops retired versions that nobody reads any more: nobody can begin to.
    fn sweep(&self) {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner).retain(|view| Arc::strong_count(view) > 1);
    }
}

fn numbers(held: &[(u64, Arc<View>)]) -> Vec<u64> {
    held.iter().map(|(version, _)| *version).collect()
}
