//! Frames of messages: a flag, four bytes of length, the message. A request and an answer have one message each.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use tonic::Status;

use crate::memory::{Memory, ReadError, collect};
use crate::protocols::compression::Compression;

const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const STATUS: HeaderName = HeaderName::from_static("grpc-status");

const HEAD_BYTES: usize = 5;
const PLAIN: u8 = 0;
const COMPRESSED: u8 = 1;

/// The compression of messages. An answer is compressed if its request may be: nearly all clients accept gzip, but
/// only clients that use it themselves want to spend time on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    Plain,
    Gzip,
}

impl Coding {
    pub(super) fn of(headers: &HeaderMap) -> Result<Coding, Status> {
        match headers.get(ENCODING).map(HeaderValue::as_bytes) {
            None | Some(b"identity") => Ok(Coding::Plain),
            Some(b"gzip") => Ok(Coding::Gzip),
            Some(_) => {
                let mut status = Status::unimplemented(format!("{ENCODING}: expected `gzip` or `identity`"));
                status.metadata_mut().as_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip,identity"));
                Err(status)
            }
        }
    }
}

/// Reads the message of a body.
pub(super) async fn read(body: Body, coding: Coding, max_bytes: usize, memory: &Arc<Memory>) -> Result<Bytes, Status> {
    let status_of = |error| match error {
        ReadError::Broken(what) => Status::internal(format!("message: {what}")),
        ReadError::TooLong => Status::out_of_range(format!("message: expected at most {max_bytes} bytes, got more")),
        ReadError::Refused(refusal) => refusal.into(),
    };
    let frame =
        collect(body, None, max_bytes.saturating_add(HEAD_BYTES), memory.reservation()).await.map_err(status_of)?;
    let (flag, message) = unframe(frame)?;
    if flag == PLAIN {
        return Ok(message);
    }
    if coding == Coding::Plain {
        return Err(Status::internal(format!("message: compressed, expected the header `{ENCODING}`, got none")));
    }
    Compression::Gzip.inflate(message, max_bytes, memory.reservation()).await.map_err(status_of)
}

/// Returns the flag and the message of a body that has one frame.
fn unframe(mut frame: Bytes) -> Result<(u8, Bytes), Status> {
    if frame.is_empty() {
        return Err(Status::invalid_argument("expected one message, got none"));
    }
    let Some(&[flag, ref length @ ..]) = frame.first_chunk::<HEAD_BYTES>() else {
        return Err(Status::internal("message: ends within its header"));
    };
    let length = u32::from_be_bytes(*length) as usize;
    if flag > COMPRESSED {
        return Err(Status::internal(format!("message: flag: expected 0 or 1, got {flag}")));
    }
    let message = frame.split_off(HEAD_BYTES);
    match message.len() {
        got if got < length => Err(Status::internal(format!("message: expected {length} bytes, got {got}"))),
        got if got > length => Err(Status::invalid_argument("expected one message, got several")),
        _ => Ok((flag, message)),
    }
}

/// Returns a message in its frame, compressed if its request may be; a message that fails to compress is sent plain.
pub(super) async fn frame(message: Bytes, coding: Coding) -> Bytes {
    let (flag, message) = match coding {
        Coding::Plain => (PLAIN, message),
        Coding::Gzip => {
            let gzipped = Compression::Gzip.compress(message.clone()).await;
            gzipped.map_or((PLAIN, message), |gzipped| (COMPRESSED, gzipped))
        }
    };
    let mut frame = BytesMut::with_capacity(HEAD_BYTES + message.len());
    frame.put_u8(flag);
    frame.put_u32(message.len() as u32);
    frame.extend_from_slice(&message);
    frame.freeze()
}

/// Returns a successful answer.
pub(super) fn respond(mut headers: HeaderMap, frame: Bytes, coding: Coding) -> Response {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    if coding == Coding::Gzip {
        headers.insert(ENCODING, HeaderValue::from_static("gzip"));
    }
    let trailers = HeaderMap::from_iter([(STATUS, HeaderValue::from_static("0"))]);
    let body = Full::new(frame).with_trailers(std::future::ready(Some(Ok(trailers))));
    let mut response = Response::new(Body::new(body));
    *response.headers_mut() = headers;
    response
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_one_frame_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok((flag, message)) = unframe(bytes.clone().into()) {
                let length = (message.len() as u32).to_be_bytes();
                prop_assert_eq!([&[flag][..], &length, &message].concat(), bytes);
            }
        }

        #[test]
        fn a_message_survives_its_frame(message in prop::collection::vec(any::<u8>(), 0..300), is_gzip: bool) {
            let coding = if is_gzip { Coding::Gzip } else { Coding::Plain };
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let back = runtime.block_on(async {
                let frame = frame(message.clone().into(), coding).await;
                read(Body::from(frame), coding, 1000, &Memory::new(0)).await
            });
            prop_assert_eq!(back.unwrap(), message);
        }
    }
}
