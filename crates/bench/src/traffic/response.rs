//! Reads HTTP/1.1 responses: their status and where they end. Bodies are skipped.

/// The bytes are not a valid response.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MalformedResponse;

/// A complete response.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// Whether the connection can take another request.
    pub(super) keeps_alive: bool,
}

/// Limits on the headers of a response.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 64;

/// Collects the bytes of a response as they arrive.
#[derive(Debug, Default)]
pub(super) struct ResponseReader {
    bytes: Vec<u8>,
    /// Set once the headers are complete.
    head: Option<Head>,
    /// Start of the next chunk of a chunked body.
    at: usize,
}

#[derive(Debug, Clone, Copy)]
struct Head {
    status: u16,
    keeps_alive: bool,
    body: Body,
}

#[derive(Debug, Clone, Copy)]
enum Body {
    /// The response ends at this byte.
    UntilByte(usize),
    Chunked,
}

impl ResponseReader {
    /// Adds bytes; returns the response once it is complete.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<Option<Answer>, MalformedResponse> {
        self.bytes.extend_from_slice(bytes);
        let head = match self.head {
            Some(head) => head,
            None => match self.read_head()? {
                Some(head) => *self.head.insert(head),
                None => return Ok(None),
            },
        };
        let end = match head.body {
            Body::UntilByte(end) => Some(end).filter(|&end| end <= self.bytes.len()),
            Body::Chunked => self.read_chunks()?,
        };
        let Some(end) = end else { return Ok(None) };
        // Bytes after the response mean that the connection is out of step.
        let keeps_alive = head.keeps_alive && end == self.bytes.len();
        self.clear();
        Ok(Some(Answer { status: head.status, keeps_alive }))
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.head = None;
        self.at = 0;
    }

    fn read_head(&mut self) -> Result<Option<Head>, MalformedResponse> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(&self.bytes).map_err(|_| MalformedResponse)?;
        let httparse::Status::Complete(length) = parsed else {
            return if self.bytes.len() > MAX_HEAD_BYTES { Err(MalformedResponse) } else { Ok(None) };
        };
        let status = response.code.ok_or(MalformedResponse)?;
        let header = |name: &str| {
            response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value)
        };
        let says = |name: &str, word: &str| {
            header(name).is_some_and(|value| value.to_ascii_lowercase().ends_with(word.as_bytes()))
        };
        let body = if matches!(status, 100..200 | 204 | 304) {
            Body::UntilByte(length)
        } else if says("transfer-encoding", "chunked") {
            Body::Chunked
        } else {
            let text =
                header("content-length").and_then(|value| std::str::from_utf8(value).ok()).ok_or(MalformedResponse)?;
            let body: usize = text.trim().parse().map_err(|_| MalformedResponse)?;
            Body::UntilByte(length.checked_add(body).ok_or(MalformedResponse)?)
        };
        let keeps_alive = response.version == Some(1) && !says("connection", "close");
        self.at = length;
        Ok(Some(Head { status, keeps_alive, body }))
    }

    /// Returns where the chunked body ends, once it is complete.
    fn read_chunks(&mut self) -> Result<Option<usize>, MalformedResponse> {
        loop {
            let rest = &self.bytes[self.at..];
            let parsed = httparse::parse_chunk_size(rest).map_err(|_| MalformedResponse)?;
            let httparse::Status::Complete((line, size)) = parsed else { return Ok(None) };
            // A chunk and its line end. Servers send no trailers unless asked to.
            let chunk =
                usize::try_from(size).ok().and_then(|size| size.checked_add(line + 2)).ok_or(MalformedResponse)?;
            if rest.len() < chunk {
                return Ok(None);
            }
            self.at += chunk;
            if size == 0 {
                return Ok(Some(self.at));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: &[u8] = b"HTTP/1.1 429 Too Many\r\nContent-LENGTH: 5\r\n\r\nhello";
    const CHUNKED: &[u8] =
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nc;x=y\r\n hello again\r\n0\r\n\r\n";
    const CLOSING: &[u8] = b"HTTP/1.1 503 No\r\nconnection: Close\r\ncontent-length: 0\r\n\r\n";
    const OLD: &[u8] = b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx";
    const EMPTY: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";

    #[test]
    fn responses_are_found_however_their_bytes_are_split() {
        for (bytes, status, keeps_alive) in
            [(LENGTH, 429, true), (CHUNKED, 200, true), (CLOSING, 503, false), (OLD, 200, false), (EMPTY, 204, true)]
        {
            let expected = Ok(Some(Answer { status, keeps_alive }));
            let mut reading = ResponseReader::default();
            for split in 0..bytes.len() {
                assert_eq!(reading.take(&bytes[..split]), Ok(None), "{split}");
                assert_eq!(reading.take(&bytes[split..]), expected, "{split}");
            }
            for byte in &bytes[..bytes.len() - 1] {
                assert_eq!(reading.take(std::slice::from_ref(byte)), Ok(None));
            }
            assert_eq!(reading.take(&bytes[bytes.len() - 1..]), expected);
        }
    }

    #[test]
    fn a_connection_with_bytes_after_the_response_is_not_reused() {
        let twice = [LENGTH, LENGTH].concat();
        assert_eq!(ResponseReader::default().take(&twice), Ok(Some(Answer { status: 429, keeps_alive: false })));
    }

    #[test]
    fn malformed_responses_are_refused() {
        for bytes in [
            b"SSH-2.0-OpenSSH\r\n".as_slice(),
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 18446744073709551615\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ] {
            assert_eq!(
                ResponseReader::default().take(bytes),
                Err(MalformedResponse),
                "{}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
