//! The first words of both ends, whoever they are, and the word no.

use thiserror::Error;

use super::{MessageError, Parts, Reader, head};

/// A client's first frame: who it is and which run it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello<'a> {
    /// What both sides of a run know of it: jobs of another kind do not meet. To a cube server, the model.
    pub run: &'a [u8],
    /// Their secret; empty on loopback without one.
    pub token: &'a [u8],
}

impl<'a> Hello<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("hello", bytes);
        let (run, token) = (reader.u32()? as usize, reader.u32()? as usize);
        let message = Hello { run: reader.array(run)?, token: reader.array(token)? };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        Parts::new(head(&[], &[self.run.len() as u32, self.token.len() as u32])).array(self.run).array(self.token)
    }
}

/// Why a request was not done, for a program to decide on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// Bytes that are no request.
    Malformed = 1,
    /// Another token or another run.
    Unauthorized = 2,
    /// Another epoch of the partition map, or another start of the server.
    Outdated = 3,
    /// The server lost its lease and may be replaced.
    Fenced = 4,
    /// The name belongs behind a boundary that is not reached: try again.
    NotYet = 5,
    /// The name was applied with other samples.
    NameClash = 6,
    /// Kept for a memory limit: try again later. Not sent yet.
    Full = 7,
    /// The server stops.
    Stopping = 8,
    /// A fault of the server's own.
    Internal = 9,
    /// The step is applied, and rows of before it are no more.
    Passed = 10,
    /// The server does not hold the version.
    NoVersion = 11,
}

impl Reason {
    fn from_number(number: u32) -> Option<Reason> {
        use Reason::{
            Fenced, Full, Internal, Malformed, NameClash, NoVersion, NotYet, Outdated, Passed, Stopping, Unauthorized,
        };
        [Malformed, Unauthorized, Outdated, Fenced, NotYet, NameClash, Full, Stopping, Internal, Passed, NoVersion]
            .into_iter()
            .find(|refusal| *refusal as u32 == number)
    }
}

/// A request that was not done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct Refusal {
    /// For programs.
    pub reason: Reason,
    /// For people.
    pub text: String,
}

impl Refusal {
    /// With a text of at most some lines.
    pub fn new(reason: Reason, text: impl Into<String>) -> Self {
        Refusal { reason, text: text.into() }
    }

    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("refused", bytes);
        let (number, length) = (reader.u32()?, reader.u32()? as usize);
        let Some(reason) = Reason::from_number(number) else {
            return reader.fail(format!("expected a reason from 1 to 11, got {number}"));
        };
        let text = String::from_utf8_lossy(reader.array(length)?).into_owned();
        reader.end()?;
        Ok(Refusal { reason, text })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'_> {
        Parts::new(head(&[], &[self.reason as u32, self.text.len() as u32])).array(self.text.as_bytes())
    }
}
