//! From a protocol to a score: the version that answers a request, its queue and its workers.
//!
//! - [`deployment`] is a version that answers requests, with its queue and its threads.
//! - [`job`] is a queued prediction with its deadline, its timing and its answer.
//! - [`worker`] takes queued requests, decodes them into one batch, scores it and encodes the answers.
//! - [`answers`] hands the answers of a batch to the connections that wait for them.
//! - [`readers`] sends lines in a user's own format to reader processes before the request is queued.
//!
//! The queue itself, with its wake-up protocol, is the crate `elasticrec-queue`.

pub(crate) mod answers;
pub(crate) mod deployment;
pub(crate) mod job;
pub(crate) mod readers;
pub(crate) mod worker;

pub use readers::Readers;
