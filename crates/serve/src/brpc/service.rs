//! The services that bRPC's clients call: Paddle Serving's predictions, Cube's rows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::RpcRequestMeta;
use super::{Fault, code};
use crate::ask::{self, Ask};
use crate::deployment::Deadline;
use crate::face::Face;
use crate::face::paddle::{Encoding, err_no};
use crate::http::MAX_TIMEOUT_MS;
use crate::refusal::Refusal;
use crate::registry::Choice;
use crate::seek::{MAX_KEYS, SeekRequest, Sought, row_bytes, seek};
use crate::server::App;

const GENERAL_MODEL: &str = "baidu.paddle_serving.predictor.general_model.GeneralModelService";
const DICT: &str = "rec.mcube.DictService";

/// What is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Infer,
    Seek,
}

impl Method {
    /// By the names that clients call it; older ones leave out the package.
    pub(super) fn of(service: &str, method: &str) -> Result<Method, Fault> {
        let is = |full: &str| full == service || full.rsplit_once('.').is_some_and(|(_, short)| short == service);
        let no_method = |known| {
            Fault::new(code::NO_METHOD, format!("{}: no method `{}`, there is {known}", few(service), few(method)))
        };
        match method {
            "inference" | "debug" if is(GENERAL_MODEL) => Ok(Method::Infer),
            "seek" if is(DICT) => Ok(Method::Seek),
            _ if is(GENERAL_MODEL) => Err(no_method("`inference`, `debug`")),
            _ if is(DICT) => Err(no_method("`seek`")),
            _ => {
                let text = format!("no service `{}`, there is `{GENERAL_MODEL}`, `{DICT}`", few(service));
                Err(Fault::new(code::NO_SERVICE, text))
            }
        }
    }

    /// Memory that a call takes while it is under way, about: its message, or the rows that it asks for.
    pub(super) fn weight(self, app: &App, payload: &[u8]) -> usize {
        match self {
            Method::Infer => payload.len(),
            // a key has one byte or more
            Method::Seek => payload.len().min(MAX_KEYS) * row_bytes(app),
        }
    }

    pub(super) async fn answer(self, app: &Arc<App>, call: &RpcRequestMeta, payload: Bytes) -> Result<Bytes, Fault> {
        match self {
            Method::Infer => infer(app, call, payload).await,
            Method::Seek => Ok(seek(app, payload, SeekRequest::of_proto, Sought::encode).await?),
        }
    }
}

/// A name as it may stand in a message.
fn few(name: &str) -> String {
    name.chars().take(80).flat_map(char::escape_debug).collect()
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
    let face = Face::Paddle(Encoding::Proto);
    let ask = Ask { choice, face, body: body.clone(), deadline: timeout.map(Deadline::within) };
    let outcome = ask::predict(&app.registry, ask).await;
    app.metrics.request.observe(started.elapsed());
    // what is wrong with a request, or with the model, is told in the message, as Paddle does
    let (refusal, number) = match outcome {
        Ok((_, done)) => return Ok(done.reply.body),
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
    fn services_have_their_full_name_or_the_last_part_of_it() {
        for service in [GENERAL_MODEL, "GeneralModelService"] {
            assert_eq!(Method::of(service, "inference"), Ok(Method::Infer));
            assert_eq!(Method::of(service, "debug"), Ok(Method::Infer));
            assert_eq!(Method::of(service, "seek").unwrap_err().code, code::NO_METHOD);
        }
        assert_eq!(Method::of(DICT, "seek"), Ok(Method::Seek));
        assert_eq!(Method::of("DictService", "seek"), Ok(Method::Seek));
        let fault = Method::of("DictService", "x").unwrap_err();
        assert_eq!(fault, Fault::new(code::NO_METHOD, "DictService: no method `x`, there is `seek`"));
        for service in ["", "mcube.DictService", "general_model.GeneralModelService"] {
            assert_eq!(Method::of(service, "seek").unwrap_err().code, code::NO_SERVICE);
        }
    }
}
