//! Explains one sample: its signs, their rows, dense values and scores, and the time of each stage.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use super::body::read_body;
use super::predict::{RequestOptions, set_answer_headers};
use super::reply::{Error, json_response};
use crate::codecs::{Codec, Limits};
use crate::model::{Model, ScoreError};
use crate::protocols::predict::{PreparedBody, prepare, score};
use crate::queue::deployment::Deployment;
use crate::refusal::Refusal;
use crate::server::App;
use crate::server::registry::Choice;

/// Explains the one sample of a request, with the version that a prediction would use.
pub(super) async fn explain(
    app: &App,
    name: &str,
    codec: Codec,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Error> {
    let options = RequestOptions::of(headers)?;
    let deadline = options.deadline(app);
    let body = read_body(headers, body, app).await?;
    let choice = Choice { model: Some(name), variant: options.variant, key: options.key, version: None };
    let deployment = app.registry.choose(choice)?;
    let prepared = prepare(&deployment, codec, &body, deadline).await?;
    let mut explained = explain_sample(&deployment, prepared.clone()).await?;
    // Scored through the queue, so that its timing is that of any prediction.
    let prediction = score(&deployment, prepared, deadline).await?;
    let answer: Value = serde_json::from_slice(&prediction.reply.body).map_err(|error| internal(&error))?;
    explained["model"] = json!(deployment.info.model);
    explained["version"] = json!(deployment.info.version);
    if !deployment.info.variant.is_empty() {
        explained["variant"] = json!(deployment.info.variant);
    }
    explained["scores"] = answer["predictions"][0].clone();
    let stages = prediction.timing.stages();
    explained["timing_ms"] = stages.map(|(stage, time)| (stage, time.as_secs_f64() * 1e3)).collect();
    let mut response = json_response(StatusCode::OK, explained.to_string());
    let timing = options.wants_timing.then_some(prediction.timing);
    set_answer_headers(response.headers_mut(), &deployment.info, timing);
    Ok(response)
}

fn internal(error: &dyn std::fmt::Display) -> Error {
    Error::from(Refusal::Internal(error.to_string()))
}

/// Returns the sample as the model sees it, from a thread for blocking work: a store may have to answer first.
async fn explain_sample(deployment: &Arc<Deployment>, prepared: PreparedBody) -> Result<Value, Error> {
    let model = deployment.model.clone().ok_or_else(|| internal(&"the version has no model"))?;
    let sample = tokio::task::spawn_blocking(move || sample_of(&model, &prepared)).await;
    Ok(sample.map_err(|error| internal(&error))??)
}

fn sample_of(model: &Model, prepared: &PreparedBody) -> Result<Value, Refusal> {
    let mut builder = model.parser().builder(1);
    prepared.codec.decode(model.parser(), &prepared.body, Limits { max_instances: 1 }, &mut builder)?;
    let batch = builder.batch();
    if batch.num_samples() != 1 {
        return Err(Refusal::Bad(format!("sample: expected 1, got {}", batch.num_samples())));
    }
    let found = model.rows().find(&batch.signs).map_err(ScoreError::from)?;
    let row = |(values, is_present): (&[f32], &bool)| if *is_present { json!(values) } else { Value::Null };
    let rows: Vec<Value> = found.values.chunks(found.width).zip(&found.present).map(row).collect();
    Ok(json!({ "signs": batch.signs, "offsets": batch.offsets, "dense": batch.dense, "rows": rows }))
}
