//! Fail points: points in the code at which a test can kill the process.
//!
//! `ELASTICREC_FAIL_POINTS` names a directory. A file `NAME.ANYTHING` in it with the content `n` kills the process that
//! reaches the point `NAME` for the nth time. The file is removed first, so that it kills one process only.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::{env, fs, process};

use elasticrec_wire::lock;

/// Kills the process here if a test asks for it.
#[inline]
pub fn fail_point(name: &str) {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    if let Some(directory) = DIRECTORY.get_or_init(|| env::var_os("ELASTICREC_FAIL_POINTS").map(PathBuf::from)) {
        reach(directory, name);
    }
}

#[cold]
fn reach(directory: &Path, name: &str) {
    static HITS: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);
    let hits = {
        let mut all = lock(&HITS);
        let hits = all.get_or_insert_default().entry(name.into()).or_default();
        *hits += 1;
        *hits
    };
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_mine = path.file_stem().is_some_and(|stem| stem == name);
        let wanted = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u64>().ok());
        // If two processes reach the point at once, only one can remove the file.
        if is_mine && wanted.is_some_and(|wanted| hits >= wanted) && fs::remove_file(&path).is_ok() {
            eprintln!("killed at fail point {name}");
            process::abort();
        }
    }
}
