//! The reason a request has no prediction, independent of the protocol. HTTP, gRPC and bRPC each map it to their codes.

use thiserror::Error;

use crate::codecs::DecodeError;

/// The reason a request has no prediction.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Refusal {
    /// The request is invalid.
    #[error("{0}")]
    Bad(String),
    /// The request is larger than a limit.
    #[error("{0}")]
    TooLarge(String),
    /// The model, variant or version does not exist.
    #[error("{0}")]
    Unknown(String),
    /// The model is not loaded yet, or its rows cannot be reached.
    #[error("{0}")]
    Unavailable(String),
    #[error("the queue of {queue} requests is full (`serve.queue`); retry later")]
    QueueFull { queue: usize },
    #[error("in-flight requests already use the limit of {max_bytes} bytes (`serve.max_pending_bytes`); retry later")]
    MemoryLimit { max_bytes: usize },
    #[error("deadline: not scored within {after_ms} ms")]
    DeadlineExceeded { after_ms: u128 },
    /// The store no longer has the version's rows; the request is repeated with the current version.
    #[error("{0}")]
    Gone(String),
    /// A bug of the server or of the model.
    #[error("{0}")]
    Internal(String),
}

impl From<DecodeError> for Refusal {
    fn from(error: DecodeError) -> Refusal {
        match error {
            DecodeError::Bad(what) => Refusal::Bad(what),
            error @ DecodeError::TooMany { .. } => Refusal::TooLarge(error.to_string()),
        }
    }
}
