//! What a model makes of one sample: its signs, their rows, dense values, scores, and where the time went.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use super::body::read_body;
use super::predict::{Called, tell};
use super::reply::{Error, json_response};
use crate::ask::{self, Readable};
use crate::deployment::Deployment;
use crate::face::{Face, Limits};
use crate::model::Model;
use crate::refusal::Refusal;
use crate::registry::Choice;
use crate::score::ScoreError;
use crate::server::App;

/// Explains the one sample of a request by the version that it would get.
pub(super) async fn explain(
    app: &App,
    name: &str,
    face: Face,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Error> {
    let called = Called::of(headers)?;
    let deadline = called.deadline(app);
    let body = read_body(headers, body, app).await?;
    let choice = Choice { model: Some(name), variant: called.variant, key: called.key, version: None };
    let deployment = app.registry.choose(choice)?;
    let read = ask::read(&deployment, face, &body, deadline).await?;
    let sample = look(&deployment, read.clone()).await?;
    // as any other request, so that its times are those of any other
    let done = ask::score(&deployment, read, deadline).await?;
    let answer: Value = serde_json::from_slice(&done.reply.body).map_err(|error| internal(&error))?;
    let mut explained = sample;
    explained["model"] = json!(deployment.about.model);
    explained["version"] = json!(deployment.about.version);
    if !deployment.about.variant.is_empty() {
        explained["variant"] = json!(deployment.about.variant);
    }
    explained["scores"] = answer["predictions"][0].clone();
    explained["timing_ms"] = done.timing.stages().map(|(stage, time)| (stage, time.as_secs_f64() * 1e3)).collect();
    let mut response = json_response(StatusCode::OK, explained.to_string());
    tell(response.headers_mut(), &deployment.about, called.wants_timing.then_some(done.timing));
    Ok(response)
}

fn internal(error: &dyn std::fmt::Display) -> Error {
    Error::from(Refusal::Internal(error.to_string()))
}

/// The sample as the model sees it; rows of a store are waited for, which is not for the threads of the sockets.
async fn look(deployment: &Arc<Deployment>, read: Readable) -> Result<Value, Error> {
    let model = deployment.model.clone().ok_or_else(|| internal(&"a version without a model"))?;
    let looked = tokio::task::spawn_blocking(move || sample_of(&model, &read)).await;
    Ok(looked.map_err(|error| internal(&error))??)
}

fn sample_of(model: &Model, read: &Readable) -> Result<Value, Refusal> {
    let mut builder = model.parser().builder(1);
    read.face.decode(model.parser(), &read.body, Limits { max_instances: 1 }, &mut builder)?;
    let batch = builder.batch();
    if batch.num_samples() != 1 {
        return Err(Refusal::Bad(format!("sample: expected 1, got {}", batch.num_samples())));
    }
    let found = model.rows().find(&batch.signs).map_err(ScoreError::from)?;
    let row = |(values, is_there): (&[f32], &bool)| if *is_there { json!(values) } else { Value::Null };
    let rows: Vec<Value> = found.values.chunks(found.width).zip(&found.present).map(row).collect();
    Ok(json!({ "signs": batch.signs, "offsets": batch.offsets, "dense": batch.dense, "rows": rows }))
}
