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
use crate::protocols::dict::{DictRows, NO_KEY, SeekRequest, seek as seek_rows};
use crate::server::App;

/// Answers `{"keys": [5, "6"], "version_required": true}` with
/// `{"values": [{"status": 0, "value": BASE64}, …], "version": "3"}`.
pub(super) async fn seek(State(app): State<Arc<App>>, request: Request) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let body = read_body(&parts.headers, body, &app).await?;
    let text = seek_rows(&app, body, SeekRequest::of_json, write).await?;
    Ok(json_response(StatusCode::OK, app.memory.reservation().cover(text.into())?))
}

fn write(found: &DictRows, version_required: bool) -> String {
    let mut text = String::from("{\"values\":[");
    for (at, row) in found.rows().enumerate() {
        text.push_str(if at == 0 { "{\"status\":" } else { ",{\"status\":" });
        let status = if row.is_some() { 0 } else { NO_KEY };
        // Writing to a string cannot fail.
        let _ = write!(text, "{status},\"value\":\"");
        STANDARD.encode_string(row.unwrap_or_default(), &mut text);
        text.push_str("\"}");
    }
    text.push(']');
    if version_required {
        let _ = write!(text, ",\"version\":\"{}\"", found.version);
    }
    text.push('}');
    text
}
