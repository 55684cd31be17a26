//! Paddle Serving's `GeneralModelService` over gRPC; its errors stand in the message, as they did there.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use tonic::{Code, Status};

use super::{Answer, is_grpc, predict, unary};
use crate::face::Face;
use crate::face::paddle::{Encoding, err_no};
use crate::http::{Target, infer_paddle};
use crate::server::App;

pub(super) const INFERENCE: &str = "/baidu.paddle_serving.predictor.general_model.GeneralModelService/inference";
pub(super) const DEBUG: &str = "/baidu.paddle_serving.predictor.general_model.GeneralModelService/debug";

pub(super) async fn infer(State(app): State<Arc<App>>, request: Request) -> Response {
    // bRPC's clients of HTTP call a service by its full name too
    if !is_grpc(request.headers()) {
        return infer_paddle(State(app), request).await;
    }
    unary(&app, request, async |call| {
        let message = call.message.clone();
        let target = Target { model: None, version: None, face: Face::Paddle(Encoding::Proto) };
        predict(&app, target, call).await.or_else(|status| told(&message, status))
    })
    .await
}

/// What is wrong with a request, or with the model, is told in the message; what another try may mend is a status.
fn told(message: &Bytes, status: Status) -> Answer {
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

    use super::super::tests::{Got, call, framed};
    use super::*;
    use crate::http::testing::{echo, install, start};
    use crate::server::ServerOptions;

    #[derive(Clone, PartialEq, prost::Message)]
    struct ErrNo {
        #[prost(int32, tag = "5")]
        err_no: i32,
    }

    #[test]
    fn answers_are_messages_and_only_what_may_be_mended_is_a_status() {
        let server = start(ServerOptions::default());
        let infer = |path: &str, message: &[u8]| call(&server, path, &[], framed(0, message).into());
        let Got { code, message, .. } = infer(INFERENCE, b"x");
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
