//! Cube's `POST /DictService/seek`: rows by sign, in JSON.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::body::read_body;
use super::reply::{Error, json_response};
use crate::seek::{NO_KEY, SeekRequest, Sought, seek as seek_rows};
use crate::server::App;

/// `{"keys": [5, "6"], "version_required": true}` to `{"values": [{"status": 0, "value": BASE64}, …], "version": "3"}`.
pub(super) async fn seek(State(app): State<Arc<App>>, request: Request) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let body = read_body(&parts.headers, body, &app).await?;
    let text = seek_rows(&app, body, SeekRequest::of_json, write).await?;
    Ok(json_response(StatusCode::OK, app.memory.share().hold(text.into())?))
}

fn write(sought: &Sought, version_required: bool) -> String {
    let mut text = String::from("{\"values\":[");
    for (at, row) in sought.rows().enumerate() {
        text.push_str(if at == 0 { "{\"status\":" } else { ",{\"status\":" });
        let status = if row.is_some() { 0 } else { NO_KEY };
        // writing to a string does not fail
        let _ = write!(text, "{status},\"value\":\"");
        STANDARD.encode_string(row.unwrap_or_default(), &mut text);
        text.push_str("\"}");
    }
    text.push(']');
    if version_required {
        let _ = write!(text, ",\"version\":\"{}\"", sought.version);
    }
    text.push('}');
    text
}
