//! Between a protocol and a score: a version that answers requests, its queue and its workers.
//!
//! - [`deployment`] is a version at work: its queue, its threads, and what answers say about it.
//! - [`job`] is a queued prediction with its deadline, its timing and its answer.
//! - [`worker`] takes the requests that wait, decodes them into one batch, has it scored and encodes the answers.
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
