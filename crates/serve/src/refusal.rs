//! Why a prediction was not made, in words of its own; what that is in HTTP, gRPC and bRPC each face says in one place.

use thiserror::Error;

use crate::face::DecodeError;

/// Why a prediction was not made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Refusal {
    /// The request is not what was asked for.
    #[error("{0}")]
    Bad(String),
    /// More than the server takes at once.
    #[error("{0}")]
    TooLarge(String),
    /// No such model, variant or version.
    #[error("{0}")]
    Unknown(String),
    /// What is asked for is not loaded yet, or cannot be reached.
    #[error("{0}")]
    Unavailable(String),
    /// As many requests wait as may.
    #[error("{queue} requests are waiting already, try again later")]
    Full { queue: usize },
    /// As much of requests is in memory as may be.
    #[error("requests under way have {max_bytes} bytes together already, as many as they may, try again later")]
    Crowded { max_bytes: usize },
    /// The caller has gone on by now.
    #[error("deadline: not scored in {after_ms} ms, the time that the request had")]
    Late { after_ms: u128 },
    /// The version's rows are no longer at the store: the request begins again with the current one.
    #[error("{0}")]
    Gone(String),
    /// A mistake of ours or of the model's.
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
