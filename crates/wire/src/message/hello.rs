//! The messages that every client and server use: the hello and the refusal.

use thiserror::Error;

use super::{MessageError, Parts, Reader, head};

/// A client's first frame: its run or model, and its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello<'a> {
    /// The id of the run; for a cube server, the name of the model.
    pub run: &'a [u8],
    /// The shared secret; empty on loopback without one.
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

    /// Returns the body.
    pub fn parts(&self) -> Parts<'a> {
        Parts::new(head(&[], &[self.run.len() as u32, self.token.len() as u32])).array(self.run).array(self.token)
    }
}

/// The reason a server refused a request; the client's next action depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// The bytes are not a valid request.
    Malformed = 1,
    /// Another token, run or model.
    Unauthorized = 2,
    /// Another epoch of the partition map, or an earlier start of the server.
    Outdated = 3,
    /// The server lost its lease and may have been replaced.
    Fenced = 4,
    /// A boundary between passes, or a step, comes first; retry later.
    NotYet = 5,
    /// The batch was applied with other samples.
    NameClash = 6,
    /// Reserved for a memory limit: retry later. No server sends it yet.
    Full = 7,
    /// The server is stopping.
    Stopping = 8,
    /// A fault of the server.
    Internal = 9,
    /// The step is applied already, and the rows before it are gone.
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
            .find(|reason| *reason as u32 == number)
    }
}

/// A server's answer to a request that it refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct Refusal {
    /// The reason, for the client.
    pub reason: Reason,
    /// The explanation, for people.
    pub text: String,
}

impl From<MessageError> for Refusal {
    fn from(error: MessageError) -> Self {
        Refusal::new(Reason::Malformed, error.to_string())
    }
}

impl Refusal {
    /// Creates a refusal; the text is a few lines at most.
    pub fn new(reason: Reason, text: impl Into<String>) -> Self {
        Refusal { reason, text: text.into() }
    }

    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("refusal", bytes);
        let (number, length) = (reader.u32()?, reader.u32()? as usize);
        let Some(reason) = Reason::from_number(number) else {
            return reader.fail(format!("expected a reason from 1 to 11, got {number}"));
        };
        let text = String::from_utf8_lossy(reader.array(length)?).into_owned();
        reader.end()?;
        Ok(Refusal { reason, text })
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'_> {
        Parts::new(head(&[], &[self.reason as u32, self.text.len() as u32])).array(self.text.as_bytes())
    }
}
