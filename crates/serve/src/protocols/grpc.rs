//! gRPC on the port of HTTP: unary methods, deadlines, and the status of each refusal.
//!
//! - `message` reads and writes the frames of messages;
//! - `health`, `tensors` (Open Inference Protocol) and `paddle` (Paddle Serving) are the services.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use prost::Message;
use tonic::{Code, Status};

use self::message::Coding;
use crate::memory::FREE_BYTES;
pub(crate) use crate::protocols::http::Target;
use crate::protocols::http::{Error, MAX_TIMEOUT_MS, RequestOptions, set_answer_headers};
use crate::protocols::predict::{self as predictions, PredictRequest};
use crate::queue::job::Deadline;
use crate::refusal::Refusal;
use crate::server::App;

mod health;
mod message;
mod paddle;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use self::health::CHECK;
pub(crate) use self::tensors::{LIVE, MODEL_INFER, READY, model_infer};

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Returns the routes of all methods.
pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route(CHECK, post(health::check))
        .route(paddle::INFERENCE, post(paddle::infer))
        .route(paddle::DEBUG, post(paddle::infer))
        .merge(tensors::routes())
}

/// Returns whether the headers are those of gRPC.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    match value.strip_prefix(b"application/grpc") {
        Some(rest) => rest.is_empty() || rest.starts_with(b"+") || rest.starts_with(b";"),
        None => false,
    }
}

/// Returns the status code of a gRPC answer, or None for an answer of another protocol. Errors have the code in their
/// headers; an answer without one succeeds.
pub(crate) fn code_of(response: &Response) -> Option<u16> {
    let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code()) as u16;
    is_grpc(response.headers()).then_some(code)
}

/// Answers a call of a method that does not exist.
pub(crate) fn unimplemented(path: &str) -> Response {
    let known = match path.strip_prefix(tensors::SERVICE) {
        Some(_) => format!(", expected one of {}", tensors::METHODS.join(", ")),
        None => String::new(),
    };
    Status::unimplemented(format!("no such method: {path}{known}")).into_http()
}

/// Answers a call without the token of this server.
pub(crate) fn unauthenticated() -> Response {
    let message = "authorization: expected metadata `Bearer TOKEN` with the token of this server";
    Status::unauthenticated(message).into_http()
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        let code = match &refusal {
            Refusal::Bad(_) => Code::InvalidArgument,
            // Not RESOURCE_EXHAUSTED, which clients retry. Messages beyond the size limit have this code too.
            Refusal::TooLarge(_) => Code::OutOfRange,
            Refusal::Unknown(_) => Code::NotFound,
            Refusal::Unavailable(_) | Refusal::Gone(_) => Code::Unavailable,
            Refusal::QueueFull { .. } | Refusal::MemoryLimit { .. } => Code::ResourceExhausted,
            Refusal::DeadlineExceeded { .. } => Code::DeadlineExceeded,
            Refusal::Internal(_) => Code::Internal,
        };
        Status::new(code, refusal.to_string())
    }
}

/// A message that has arrived, with its headers.
pub(crate) struct Call {
    pub(crate) message: Bytes,
    headers: HeaderMap,
    started: Instant,
    deadline: Option<Deadline>,
}

/// The headers and the encoded message of an answer.
pub(crate) type Answer = Result<(HeaderMap, Bytes), Status>;

/// Reads the message of a request within its limits, and responds with the message that `answer` returns.
pub(crate) async fn unary<Fut>(app: &App, request: Request, answer: impl FnOnce(Call) -> Fut) -> Response
where
    Fut: Future<Output = Answer>,
{
    if !is_grpc(request.headers()) {
        let message = "content type: expected `application/grpc`";
        return Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    }
    exchange(app, request, answer).await.unwrap_or_else(Status::into_http)
}

async fn exchange<Fut>(app: &App, request: Request, answer: impl FnOnce(Call) -> Fut) -> Result<Response, Status>
where
    Fut: Future<Output = Answer>,
{
    let started = Instant::now();
    let (Parts { headers, uri, .. }, body) = request.into_parts();
    let deadline = deadline(app, &headers)?;
    let coding = Coding::of(&headers)?;
    // Unauthenticated probes may not reserve request memory.
    let is_probe = [CHECK, LIVE, READY].contains(&uri.path());
    let max_bytes = if is_probe { app.options.max_body_bytes.min(FREE_BYTES) } else { app.options.max_body_bytes };
    let message = within_time_limit(app, deadline, message::read(body, coding, max_bytes, &app.memory)).await?;
    let (headers, message) = answer(Call { message, headers, started, deadline }).await?;
    let frame = app.memory.reservation().cover(message::frame(message, coding).await)?;
    Ok(message::respond(headers, frame, coding))
}

/// Waits for a message until the deadline of the request or the time limit for bodies, whichever is earlier.
async fn within_time_limit(
    app: &App,
    deadline: Option<Deadline>,
    message: impl Future<Output = Result<Bytes, Status>>,
) -> Result<Bytes, Status> {
    let latest = Deadline::within(app.options.body_timeout);
    let first = deadline.filter(|deadline| deadline.at < latest.at);
    tokio::time::timeout_at(first.unwrap_or(latest).at.into(), message).await.unwrap_or_else(|_| {
        Err(match first {
            Some(deadline) => deadline.refusal().into(),
            None => {
                let seconds = app.options.body_timeout.as_secs_f64();
                Status::deadline_exceeded(format!("message: did not arrive within {seconds} s"))
            }
        })
    })
}

/// Decodes a small message; messages with samples are decoded by the workers.
pub(crate) fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|error| Status::invalid_argument(format!("message: {error}")))
}

/// Returns an answer without headers.
pub(crate) fn encode(message: &impl Message) -> Answer {
    Ok((HeaderMap::new(), message.encode_to_vec().into()))
}

/// Scores the samples of a message.
pub(crate) async fn predict(app: &App, target: Target<'_>, call: Call) -> Answer {
    let Call { message, headers, started, deadline } = call;
    let options = RequestOptions::of(&headers)?;
    let request = PredictRequest { choice: target.choice(options), codec: target.codec, body: message, deadline };
    let outcome = predictions::predict(&app.registry, request).await;
    app.metrics.request.observe(started.elapsed());
    let (info, prediction) = outcome?;
    let mut answer_headers = HeaderMap::new();
    set_answer_headers(&mut answer_headers, &info, options.wants_timing.then_some(prediction.timing));
    Ok((answer_headers, prediction.reply.body))
}

/// Returns the deadline of a request: from `grpc-timeout`, from the header that HTTP uses, or from the configuration.
fn deadline(app: &App, headers: &HeaderMap) -> Result<Option<Deadline>, Refusal> {
    let options = RequestOptions::of(headers)?;
    let Some(value) = headers.get(GRPC_TIMEOUT) else { return Ok(options.deadline(app)) };
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
