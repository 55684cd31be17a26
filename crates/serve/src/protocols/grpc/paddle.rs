//! Paddle Serving's `GeneralModelService` over gRPC. Errors are fields of the message, as in Paddle Serving.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use tonic::{Code, Status};

use super::{Answer, is_grpc, predict, unary};
use crate::codecs::Codec;
use crate::codecs::paddle::{Encoding, err_no};
use crate::protocols::http::{Target, infer_paddle};
use crate::server::App;

pub(super) const INFERENCE: &str = "/baidu.paddle_serving.predictor.general_model.GeneralModelService/inference";
pub(super) const DEBUG: &str = "/baidu.paddle_serving.predictor.general_model.GeneralModelService/debug";

pub(super) async fn infer(State(app): State<Arc<App>>, request: Request) -> Response {
    // bRPC's HTTP clients call services by their full name too.
    if !is_grpc(request.headers()) {
        return infer_paddle(State(app), request).await;
    }
    unary(&app, request, async |call| {
        let message = call.message.clone();
        let target = Target { model: None, version: None, codec: Codec::Paddle(Encoding::Proto) };
        predict(&app, target, call).await.or_else(|status| refusal_message(&message, status))
    })
    .await
}

/// Returns a message for an error of the request or of the model, and the status for an error that a retry may solve.
fn refusal_message(message: &Bytes, status: Status) -> Answer {
    let number = match status.code() {
        Code::InvalidArgument | Code::NotFound => err_no::FAILURE,
        Code::OutOfRange => err_no::OVERFLOW,
        Code::Internal => err_no::INFERENCE,
        _ => return Err(status),
    };
    Ok((HeaderMap::new(), Encoding::Proto.refusal(message, number, status.message())))
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::tests::{CallResult, call, framed};
    use super::*;
    use crate::protocols::http::testing::{echo, install, start};
    use crate::server::ServerOptions;

    #[derive(Clone, PartialEq, prost::Message)]
    struct ErrNo {
        #[prost(int32, tag = "5")]
        err_no: i32,
    }

    #[test]
    fn errors_are_messages_unless_a_retry_may_solve_them() {
        let server = start(ServerOptions::default());
        let infer = |path: &str, message: &[u8]| call(&server, path, &[], framed(0, message).into());
        let CallResult { code, message, .. } = infer(INFERENCE, b"x");
        assert_eq!((code, message.as_str()), (14, "model `demo`: no version is ready yet"));
        install(&server, 3, echo);
        for path in [INFERENCE, DEBUG] {
            let got = infer(path, b"x");
            assert_eq!((got.code, &got.body[5..]), (0, &b"Paddle(Proto):x"[..]));
        }
        for (message, number) in [(&b"bad"[..], -5000), (b"many", -5002), (b"nan", -5100)] {
            let got = infer(INFERENCE, message);
            assert_eq!((got.code, ErrNo::decode(&got.body[5..]).unwrap().err_no), (0, number));
        }
    }
}
