//! Messages in and out of their frames: a flag, four bytes of length, the message. A request and an answer have one each.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use flate2::read::MultiGzDecoder;
use http_body_util::{BodyExt, Full};
use tonic::Status;

use crate::http::gzip;
use crate::memory::{Memory, Unread, collect, read_within};

const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const STATUS: HeaderName = HeaderName::from_static("grpc-status");

const HEAD_BYTES: usize = 5;
const PLAIN: u8 = 0;
const COMPRESSED: u8 = 1;

/// How messages may be compressed; an answer is as its request: nearly all clients can read gzip, those that want the time
/// spent on it send it.
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

/// The one message of a body.
pub(super) async fn read(body: Body, coding: Coding, max_bytes: usize, memory: &Arc<Memory>) -> Result<Bytes, Status> {
    let unread = |unread| match unread {
        Unread::Broken(what) => Status::internal(format!("message: {what}")),
        Unread::TooLong => Status::out_of_range(format!("message: expected at most {max_bytes} bytes, got more")),
        Unread::Refused(refusal) => refusal.into(),
    };
    let frame = collect(body, None, max_bytes.saturating_add(HEAD_BYTES), memory.share()).await.map_err(unread)?;
    let (flag, message) = unframe(frame)?;
    if flag == PLAIN {
        return Ok(message);
    }
    if coding == Coding::Plain {
        return Err(Status::internal(format!("message: is compressed, expected `{ENCODING}` to say how")));
    }
    let share = memory.share();
    // a small message may have a lot in it, which is not for a thread of the sockets
    let inflated =
        tokio::task::spawn_blocking(move || read_within(MultiGzDecoder::new(&message[..]), max_bytes, share)).await;
    inflated.map_err(|error| Status::internal(error.to_string()))?.map_err(unread)
}

/// The flag and the message of a frame that is alone.
fn unframe(mut frame: Bytes) -> Result<(u8, Bytes), Status> {
    if frame.is_empty() {
        return Err(Status::invalid_argument("expected one message, got none"));
    }
    let Some(&[flag, ref length @ ..]) = frame.first_chunk::<HEAD_BYTES>() else {
        return Err(Status::internal("message: ends within its head"));
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

/// A message in its frame.
pub(super) async fn frame(message: Bytes, coding: Coding) -> Bytes {
    let (flag, message) = match coding {
        Coding::Plain => (PLAIN, message),
        Coding::Gzip => {
            let gzipped = gzip(message.clone()).await;
            gzipped.map_or((PLAIN, message), |gzipped| (COMPRESSED, gzipped))
        }
    };
    let mut frame = BytesMut::with_capacity(HEAD_BYTES + message.len());
    frame.put_u8(flag);
    frame.put_u32(message.len() as u32);
    frame.extend_from_slice(&message);
    frame.freeze()
}

/// An answer that is a good one.
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
        fn a_message_comes_back_out_of_its_frame(message in prop::collection::vec(any::<u8>(), 0..300), is_gzip: bool) {
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
