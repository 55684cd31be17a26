//! Frames of `baidu_std`: `PRPC`, the size of the rest, the size of the meta, the meta, the message, an attachment.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

use super::MAGIC;

const HEAD_BYTES: usize = 12;
/// More than enough for names, numbers and a token.
const MAX_META_BYTES: usize = 1 << 16;

/// The meta of a frame; other fields are ignored.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RpcMeta {
    #[prost(message, optional, tag = "1")]
    pub(super) request: Option<RpcRequestMeta>,
    #[prost(message, optional, tag = "2")]
    pub(super) response: Option<RpcResponseMeta>,
    #[prost(int32, optional, tag = "3")]
    pub(super) compress_type: Option<i32>,
    #[prost(int64, optional, tag = "4")]
    pub(super) correlation_id: Option<i64>,
    #[prost(int32, optional, tag = "5")]
    pub(super) attachment_size: Option<i32>,
    #[prost(bytes = "bytes", optional, tag = "7")]
    pub(super) authentication_data: Option<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RpcRequestMeta {
    #[prost(string, tag = "1")]
    pub(super) service_name: String,
    #[prost(string, tag = "2")]
    pub(super) method_name: String,
    #[prost(int64, tag = "3")]
    pub(super) log_id: i64,
    /// Text from C++ clients, a key and a value from Java clients; equal bytes are the same id.
    #[prost(bytes = "bytes", tag = "7")]
    pub(super) request_id: Bytes,
    #[prost(int32, tag = "8")]
    pub(super) timeout_ms: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RpcResponseMeta {
    #[prost(int32, optional, tag = "1")]
    pub(super) error_code: Option<i32>,
    #[prost(string, optional, tag = "2")]
    pub(super) error_text: Option<String>,
}

/// A call as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Request {
    pub(super) call: RpcRequestMeta,
    pub(super) correlation_id: i64,
    pub(super) compress_type: i32,
    pub(super) authentication_data: Option<Bytes>,
    /// The message; attachments are ignored.
    pub(super) payload: Bytes,
}

/// The reason no more frames can be read from a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FrameError {
    /// Not a request of this protocol.
    Malformed,
    /// Longer than the limit; the call is refused by its id.
    TooLong { correlation_id: i64 },
}

/// Takes the first frame from the bytes read so far, or returns None if it is incomplete.
pub(super) fn take(buffer: &mut BytesMut, max_payload: usize) -> Result<Option<Request>, FrameError> {
    let known = buffer.len().min(MAGIC.len());
    if buffer[..known] != MAGIC[..known] {
        return Err(FrameError::Malformed);
    }
    let Some(mut sizes) = buffer.get(MAGIC.len()..HEAD_BYTES) else { return Ok(None) };
    let (body_bytes, meta_bytes) = (sizes.get_u32() as usize, sizes.get_u32() as usize);
    if meta_bytes > body_bytes.min(MAX_META_BYTES) {
        return Err(FrameError::Malformed);
    }
    if body_bytes - meta_bytes > max_payload {
        if buffer.len() < HEAD_BYTES + meta_bytes {
            return Ok(None);
        }
        let too_long = |meta: RpcMeta| FrameError::TooLong { correlation_id: meta.correlation_id.unwrap_or(0) };
        return Err(meta(buffer).map_or(FrameError::Malformed, too_long));
    }
    if buffer.len() < HEAD_BYTES + body_bytes {
        return Ok(None);
    }
    let mut frame = buffer.split_to(HEAD_BYTES + body_bytes).freeze();
    let meta = frame.slice(HEAD_BYTES..HEAD_BYTES + meta_bytes);
    frame.advance(HEAD_BYTES + meta_bytes);
    Request::of(meta, frame).map(Some).ok_or(FrameError::Malformed)
}

/// Returns the meta of the first frame, once it has arrived.
pub(super) fn meta(buffer: &[u8]) -> Option<RpcMeta> {
    let meta_bytes = buffer.get(MAGIC.len()..HEAD_BYTES)?.last_chunk().map(|&size| u32::from_be_bytes(size))?;
    let meta = buffer.get(HEAD_BYTES..HEAD_BYTES.checked_add(meta_bytes as usize)?)?;
    RpcMeta::decode(meta).ok()
}

impl Request {
    fn of(meta: Bytes, mut payload: Bytes) -> Option<Request> {
        let meta = RpcMeta::decode(meta).ok()?;
        let attachment_bytes = usize::try_from(meta.attachment_size.unwrap_or(0)).ok()?;
        payload.truncate(payload.len().checked_sub(attachment_bytes)?);
        Some(Request {
            call: meta.request?,
            correlation_id: meta.correlation_id.unwrap_or(0),
            compress_type: meta.compress_type.unwrap_or(0),
            authentication_data: meta.authentication_data,
            payload,
        })
    }
}

/// Returns a frame with this meta and message.
pub(super) fn encode(meta: &RpcMeta, payload: &[u8]) -> Bytes {
    let meta_bytes = meta.encoded_len();
    let body_bytes = meta_bytes + payload.len();
    let mut frame = BytesMut::with_capacity(HEAD_BYTES + body_bytes);
    frame.put_slice(&MAGIC);
    frame.put_u32(body_bytes as u32);
    frame.put_u32(meta_bytes as u32);
    // A `BytesMut` grows, so encoding cannot fail.
    let _ = meta.encode(&mut frame);
    frame.put_slice(payload);
    frame.freeze()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fuzz_brpc;
    use super::*;

    fn meta(service: &str, id: i64) -> RpcMeta {
        let request = RpcRequestMeta { service_name: service.into(), method_name: "m".into(), ..Default::default() };
        RpcMeta { request: Some(request), correlation_id: Some(id), ..RpcMeta::default() }
    }

    fn taken(bytes: &[u8]) -> Result<Option<Request>, FrameError> {
        take(&mut BytesMut::from(bytes), 100)
    }

    #[test]
    fn a_frame_has_the_bytes_that_brpc_writes() {
        let frame = encode(&meta("S", 7), b"xyz");
        assert_eq!(&frame[..], b"PRPC\x00\x00\x00\x0d\x00\x00\x00\x0a\x0a\x06\x0a\x01S\x12\x01m\x20\x07xyz");
        let request = taken(&frame).unwrap().unwrap();
        assert_eq!((request.call.service_name.as_str(), request.correlation_id), ("S", 7));
        assert_eq!(&request.payload[..], b"xyz");
    }

    #[test]
    fn attachments_are_dropped() {
        let with = |size| encode(&RpcMeta { attachment_size: Some(size), ..meta("S", 7) }, b"xyz");
        assert_eq!(&taken(&with(2)).unwrap().unwrap().payload[..], b"x");
        assert_eq!(taken(&with(4)), Err(FrameError::Malformed));
        assert_eq!(taken(&with(-1)), Err(FrameError::Malformed));
    }

    #[test]
    fn malformed_frames_are_refused_and_long_ones_return_their_id() {
        assert_eq!(taken(b"POST"), Err(FrameError::Malformed));
        assert_eq!(taken(b"PRPC\0\0\0\x01\0\0\0\x02"), Err(FrameError::Malformed));
        assert_eq!(taken(b"PRPC\xff\xff\xff\xff\xff\xff\xff\xff"), Err(FrameError::Malformed));
        assert_eq!(taken(b"PRPC\0\0\0\x01\0\0\0\x01\xff"), Err(FrameError::Malformed));
        assert_eq!(taken(&encode(&RpcMeta::default(), b"")), Err(FrameError::Malformed));
        assert_eq!(taken(&encode(&meta("S", 9), &[0; 101])), Err(FrameError::TooLong { correlation_id: 9 }));
        // Refused before any of its payload arrives.
        let mut head = BytesMut::from(&encode(&meta("S", 9), b"")[..]);
        head[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(taken(&head), Err(FrameError::TooLong { correlation_id: 9 }));
        assert!(taken(&encode(&meta("S", 9), &[0; 100])).unwrap().is_some());
    }

    proptest! {
        #[test]
        fn frames_are_taken_one_by_one_however_they_are_split(
            sent in prop::collection::vec((any::<i64>(), prop::collection::vec(any::<u8>(), 0..20)), 0..5),
            step in 1usize..40,
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(|(id, payload)| encode(&meta("S", *id), payload)).collect();
            let (mut buffer, mut got) = (BytesMut::new(), Vec::new());
            for piece in bytes.chunks(step) {
                buffer.extend_from_slice(piece);
                while let Some(request) = take(&mut buffer, 100).unwrap() {
                    got.push((request.correlation_id, request.payload.to_vec()));
                }
            }
            prop_assert_eq!(got, sent);
            prop_assert!(buffer.is_empty());
        }

        #[test]
        fn hostile_bytes_are_taken_or_refused(
            id in any::<i64>(), payload in prop::collection::vec(any::<u8>(), 0..40), compress_type in -1i32..5,
            changes in prop::collection::vec((0usize..80, any::<u8>()), 0..3), num_dropped in 0usize..80,
        ) {
            let meta = RpcMeta { compress_type: Some(compress_type), ..meta("rec.mcube.DictService", id) };
            let mut bytes = encode(&meta, &payload).to_vec();
            for (at, byte) in changes {
                if let Some(old) = bytes.get_mut(at) {
                    *old = byte;
                }
            }
            fuzz_brpc(&bytes);
            fuzz_brpc(&bytes[..bytes.len().saturating_sub(num_dropped)]);
        }
    }
}
