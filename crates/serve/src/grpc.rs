//! gRPC beside HTTP on one port: messages in and out of their frames, deadlines, and what each refusal is here, said once.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::{Buf, BufMut, Bytes};
use hyper::body::Frame;
use prost::Message;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::metadata::MetadataMap;
use tonic::server::{ClientStreamingService, Grpc};
use tonic::{Code, Status};

use crate::ask::{self, Ask};
use crate::deployment::Deadline;
pub(crate) use crate::http::Target;
use crate::http::{Called, Error, MAX_TIMEOUT_MS, tell};
use crate::memory::Share;
use crate::refusal::Refusal;
use crate::server::App;

mod health;
mod paddle;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use self::health::CHECK;
pub(crate) use self::tensors::{LIVE, MODEL_INFER, READY, model_infer};

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

/// The methods, by path.
pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route(CHECK, post(health::check))
        .route(paddle::INFERENCE, post(paddle::infer))
        .route(paddle::DEBUG, post(paddle::infer))
        .merge(tensors::routes())
}

/// Whether a request speaks gRPC.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    match value.strip_prefix(b"application/grpc") {
        Some(rest) => rest.is_empty() || rest.starts_with(b"+") || rest.starts_with(b";"),
        None => false,
    }
}

/// The code of an answer: errors have it in their head, what has none is on its way to a good end.
pub(crate) fn code_of(response: &Response) -> u16 {
    Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code()) as u16
}

/// A method that does not exist.
pub(crate) fn unimplemented(path: &str) -> Response {
    let there_is = match path.strip_prefix(tensors::SERVICE) {
        Some(_) => format!(", there is {}", tensors::METHODS.join(", ")),
        None => String::new(),
    };
    Status::unimplemented(format!("no such method: {path}{there_is}")).into_http()
}

/// A request without the token of this server.
pub(crate) fn unauthenticated() -> Response {
    let message = "expected the metadata `authorization: bearer TOKEN` with the token of this server";
    Status::unauthenticated(message).into_http()
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        let code = match &refusal {
            Refusal::Bad(_) => Code::InvalidArgument,
            // RESOURCE_EXHAUSTED is worth another try, this is not; a message beyond the limit is told so too
            Refusal::TooLarge(_) => Code::OutOfRange,
            Refusal::Unknown(_) => Code::NotFound,
            Refusal::Unavailable(_) | Refusal::Gone(_) => Code::Unavailable,
            Refusal::Full { .. } | Refusal::Crowded { .. } => Code::ResourceExhausted,
            Refusal::Late { .. } => Code::DeadlineExceeded,
            Refusal::Internal(_) => Code::Internal,
        };
        Status::new(code, refusal.to_string())
    }
}

/// A message that has come, and what its head said.
pub(crate) struct Call {
    pub(crate) message: Bytes,
    metadata: MetadataMap,
    started: Instant,
    deadline: Option<Deadline>,
}

/// An encoded message on its way out, with metadata.
pub(crate) type Answer = Result<tonic::Response<Bytes>, Status>;

/// Reads the one message of a request, within its limits and in time, and sends what `answer` makes of it.
pub(crate) async fn unary<Fut>(app: &App, request: Request, answer: impl Fn(Call) -> Fut) -> Response
where
    Fut: Future<Output = Answer>,
{
    if !is_grpc(request.headers()) {
        let message = "content type: expected `application/grpc`";
        return Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    }
    let started = Instant::now();
    let deadline = match deadline(app, request.headers()) {
        Ok(deadline) => deadline,
        Err(refusal) => return Status::from(refusal).into_http(),
    };
    let method = Unary(|request: tonic::Request<Streaming<Bytes>>| {
        let (metadata, _, stream) = request.into_parts();
        let answer = &answer;
        async move {
            let message = read(app, stream, deadline).await?;
            let mut share = app.memory.share();
            share.cover(message.len())?;
            let message = share.keep(message);
            answer(Call { message, metadata, started, deadline }).await
        }
    });
    let mut grpc = Grpc::new(Raw)
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(app.options.max_body_bytes);
    // nearly all clients can read gzip; those that want the time spent on it send it
    if request.headers().get(GRPC_ENCODING).is_some_and(|encoding| encoding == "gzip") {
        grpc = grpc.send_compressed(CompressionEncoding::Gzip);
    }
    let request = request.map(|body| Counted { body, num_bytes: 0, share: app.memory.share() });
    grpc.client_streaming(method, request).await.map(Body::new)
}

/// The one message of a request.
async fn read(app: &App, mut stream: Streaming<Bytes>, deadline: Option<Deadline>) -> Result<Bytes, Status> {
    let message = async {
        let Some(message) = stream.message().await? else {
            return Err(Status::invalid_argument("expected one message, got none"));
        };
        match stream.message().await? {
            Some(_) => Err(Status::invalid_argument("expected one message, got several")),
            None => Ok(message),
        }
    };
    let latest = Deadline::within(app.options.body_timeout);
    let first = deadline.filter(|deadline| deadline.at < latest.at);
    tokio::time::timeout_at(first.unwrap_or(latest).at.into(), message).await.unwrap_or_else(|_| {
        Err(match first {
            Some(deadline) => deadline.refusal().into(),
            None => {
                let seconds = app.options.body_timeout.as_secs_f64();
                Status::deadline_exceeded(format!("message: did not arrive in {seconds} s"))
            }
        })
    })
}

/// Decodes a small message; large ones are left to the scorers.
pub(crate) fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|error| Status::invalid_argument(format!("message: {error}")))
}

/// An answer that needs no scorer.
pub(crate) fn encode(message: &impl Message) -> Answer {
    Ok(tonic::Response::new(message.encode_to_vec().into()))
}

/// Has a message scored.
pub(crate) async fn predict(app: &App, target: Target<'_>, call: Call) -> Answer {
    let called = Called::of(call.metadata.as_ref())?;
    let ask = Ask { choice: target.choice(called), face: target.face, body: call.message, deadline: call.deadline };
    let outcome = ask::predict(&app.registry, ask).await;
    app.metrics.request.observe(call.started.elapsed());
    let (about, done) = outcome?;
    let mut headers = HeaderMap::new();
    tell(&mut headers, &about, called.wants_timing.then_some(done.timing));
    let mut response = tonic::Response::new(done.reply.body);
    *response.metadata_mut() = MetadataMap::from_headers(headers);
    Ok(response)
}

/// When the time of a request is over: as gRPC says it, as HTTP does, or as the server is set.
fn deadline(app: &App, headers: &HeaderMap) -> Result<Option<Deadline>, Refusal> {
    let called = Called::of(headers)?;
    let Some(value) = headers.get(GRPC_TIMEOUT) else { return Ok(called.deadline(app)) };
    let timeout = parse_timeout(value.as_bytes())
        .ok_or_else(|| Refusal::Bad(format!("{GRPC_TIMEOUT}: expected up to 8 digits and one of H, M, S, m, u, n")))?;
    Ok(Some(Deadline::within(timeout.min(Duration::from_millis(MAX_TIMEOUT_MS)))))
}

fn parse_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = digits.iter().fold(0u64, |number, digit| number * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

/// A body that counts as memory while it comes.
struct Counted {
    body: Body,
    num_bytes: usize,
    share: Share,
}

impl hyper::body::Body for Counted {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            self.num_bytes += data.len();
            let num_bytes = self.num_bytes;
            if let Err(refusal) = self.share.cover(num_bytes) {
                return Poll::Ready(Some(Err(Status::from(refusal).into())));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(axum::BoxError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

/// A method of one message, read as a stream so that its time can be limited.
struct Unary<F>(F);

impl<F, Fut> ClientStreamingService<Bytes> for Unary<F>
where
    F: Fn(tonic::Request<Streaming<Bytes>>) -> Fut,
    Fut: Future<Output = Answer>,
{
    type Response = Bytes;
    type Future = Fut;

    fn call(&mut self, request: tonic::Request<Streaming<Bytes>>) -> Fut {
        (self.0)(request)
    }
}

/// Messages as they are: who needs one decodes it, in a thread that may take the time.
#[derive(Debug, Clone, Copy)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.reserve(message.len());
        into.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        // cut off, not copied
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
