//! The services for bRPC's clients: Paddle Serving's predictions and Cube's rows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use elasticrec_sample::parser::excerpt_up_to;

use super::frame::RpcRequestMeta;
use super::{Fault, code};
use crate::codecs::Codec;
use crate::codecs::paddle::{Encoding, err_no};
use crate::protocols::dict::{DictRows, MAX_KEYS, SeekRequest, row_bytes, seek};
use crate::protocols::http::MAX_TIMEOUT_MS;
use crate::protocols::predict::{PredictRequest, predict};
use crate::queue::job::Deadline;
use crate::refusal::Refusal;
use crate::server::App;
use crate::server::registry::Choice;

const GENERAL_MODEL: &str = "baidu.paddle_serving.predictor.general_model.GeneralModelService";
const DICT: &str = "rec.mcube.DictService";
/// Characters of an unknown name in a message.
const NAME_CHARS: usize = 80;

/// A method of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Infer,
    Seek,
}

impl Method {
    /// Returns the method of these names; older clients leave out the package of the service.
    pub(super) fn of(service: &str, method: &str) -> Result<Method, Fault> {
        let is = |full: &str| full == service || full.rsplit_once('.').is_some_and(|(_, short)| short == service);
        let no_method = |known| {
            let (service, method) = (excerpt_up_to(NAME_CHARS, service), excerpt_up_to(NAME_CHARS, method));
            Fault::new(code::NO_METHOD, format!("{service}: unknown method `{method}`, expected {known}"))
        };
        match method {
            "inference" | "debug" if is(GENERAL_MODEL) => Ok(Method::Infer),
            "seek" if is(DICT) => Ok(Method::Seek),
            _ if is(GENERAL_MODEL) => Err(no_method("`inference` or `debug`")),
            _ if is(DICT) => Err(no_method("`seek`")),
            _ => {
                let service = excerpt_up_to(NAME_CHARS, service);
                let text = format!("unknown service `{service}`, expected `{GENERAL_MODEL}` or `{DICT}`");
                Err(Fault::new(code::NO_SERVICE, text))
            }
        }
    }

    /// Estimates the memory of a call in flight: its message, or the rows that it asks for.
    pub(super) fn weight(self, app: &App, payload: &[u8]) -> usize {
        match self {
            Method::Infer => payload.len(),
            // A key has at least one byte.
            Method::Seek => payload.len().min(MAX_KEYS) * row_bytes(app),
        }
    }

    pub(super) async fn answer(self, app: &Arc<App>, call: &RpcRequestMeta, payload: Bytes) -> Result<Bytes, Fault> {
        match self {
            Method::Infer => infer(app, call, payload).await,
            Method::Seek => Ok(seek(app, payload, SeekRequest::of_proto, DictRows::encode).await?),
        }
    }
}

async fn infer(app: &App, call: &RpcRequestMeta, body: Bytes) -> Result<Bytes, Fault> {
    let started = Instant::now();
    let key = match (&call.request_id[..], call.log_id) {
        ([], 0) => None,
        ([], log_id) => Some(log_id.to_string().into_bytes()),
        (request_id, _) => Some(request_id.to_vec()),
    };
    let timeout = u64::try_from(call.timeout_ms).ok().filter(|&ms| ms > 0);
    let timeout = timeout.map(|ms| Duration::from_millis(ms.min(MAX_TIMEOUT_MS))).or(app.options.timeout);
    let choice = Choice { key: key.as_deref(), ..Choice::default() };
    let codec = Codec::Paddle(Encoding::Proto);
    let request = PredictRequest { choice, codec, body: body.clone(), deadline: timeout.map(Deadline::within) };
    let outcome = predict(&app.registry, request).await;
    app.metrics.request.observe(started.elapsed());
    // Errors of the request or of the model are fields of the message, as in Paddle Serving.
    let (refusal, number) = match outcome {
        Ok((_, prediction)) => return Ok(prediction.reply.body),
        Err(refusal @ (Refusal::Bad(_) | Refusal::Unknown(_))) => (refusal, err_no::FAILURE),
        Err(refusal @ Refusal::TooLarge(_)) => (refusal, err_no::OVERFLOW),
        Err(refusal @ Refusal::Internal(_)) => (refusal, err_no::INFERENCE),
        Err(refusal) => return Err(refusal.into()),
    };
    Ok(Encoding::Proto.refusal(&body, number, &refusal.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_found_by_full_name_and_by_its_last_part() {
        for service in [GENERAL_MODEL, "GeneralModelService"] {
            assert_eq!(Method::of(service, "inference"), Ok(Method::Infer));
            assert_eq!(Method::of(service, "debug"), Ok(Method::Infer));
            assert_eq!(Method::of(service, "seek").unwrap_err().code, code::NO_METHOD);
        }
        assert_eq!(Method::of(DICT, "seek"), Ok(Method::Seek));
        assert_eq!(Method::of("DictService", "seek"), Ok(Method::Seek));
        let fault = Method::of("DictService", "x").unwrap_err();
        let text = "DictService: unknown method `x`, expected `seek`";
        assert_eq!(fault, Fault::new(code::NO_METHOD, text));
        for service in ["", "mcube.DictService", "general_model.GeneralModelService"] {
            assert_eq!(Method::of(service, "seek").unwrap_err().code, code::NO_SERVICE);
        }
    }
}
