//! gRPC beside HTTP on one port: methods of one message, deadlines, and what each refusal is here, said once.

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
use crate::ask::{self, Ask};
use crate::deployment::Deadline;
pub(crate) use crate::http::Target;
use crate::http::{Called, Error, MAX_TIMEOUT_MS, tell};
use crate::memory::FREE_BYTES;
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

/// The code of an answer: errors have it in their head, what has none is on its way to a good end. None of an answer that
/// is not of gRPC.
pub(crate) fn code_of(response: &Response) -> Option<u16> {
    let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code()) as u16;
    is_grpc(response.headers()).then_some(code)
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
    headers: HeaderMap,
    started: Instant,
    deadline: Option<Deadline>,
}

/// An encoded message on its way out, and what its head says.
pub(crate) type Answer = Result<(HeaderMap, Bytes), Status>;

/// Reads the one message of a request, within its limits and in time, and sends what `answer` makes of it.
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
    // who needs no token gets no memory
    let is_probe = [CHECK, LIVE, READY].contains(&uri.path());
    let max_bytes = if is_probe { app.options.max_body_bytes.min(FREE_BYTES) } else { app.options.max_body_bytes };
    let message = in_time(app, deadline, message::read(body, coding, max_bytes, &app.memory)).await?;
    let (headers, message) = answer(Call { message, headers, started, deadline }).await?;
    let frame = app.memory.share().hold(message::frame(message, coding).await)?;
    Ok(message::respond(headers, frame, coding))
}

/// A message that has to come in time.
async fn in_time(
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
    Ok((HeaderMap::new(), message.encode_to_vec().into()))
}

/// Has a message scored.
pub(crate) async fn predict(app: &App, target: Target<'_>, call: Call) -> Answer {
    let called = Called::of(&call.headers)?;
    let ask = Ask { choice: target.choice(called), face: target.face, body: call.message, deadline: call.deadline };
    let outcome = ask::predict(&app.registry, ask).await;
    app.metrics.request.observe(call.started.elapsed());
    let (about, done) = outcome?;
    let mut headers = HeaderMap::new();
    tell(&mut headers, &about, called.wants_timing.then_some(done.timing));
    Ok((headers, done.reply.body))
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
