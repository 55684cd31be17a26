//! A request between its protocol and the workers: choose the version, prepare the body, wait for the scores.

use std::sync::Arc;

use bytes::Bytes;

use crate::codecs::{Codec, VersionInfo};
use crate::queue::deployment::{self, Deployment};
use crate::queue::job::{Deadline, Prediction};
use crate::queue::readers::{ParsedLines, ReaderTime};
use crate::refusal::Refusal;
use crate::server::registry::{Choice, Registry};

/// A request, independent of its protocol.
pub(crate) struct PredictRequest<'a> {
    pub(crate) choice: Choice<'a>,
    pub(crate) codec: Codec,
    pub(crate) body: Bytes,
    pub(crate) deadline: Option<Deadline>,
}

/// Scores a request; returns the version that scored it and the prediction.
pub(crate) async fn predict(
    registry: &Registry,
    request: PredictRequest<'_>,
) -> Result<(Arc<VersionInfo>, Prediction), Refusal> {
    match attempt(registry, &request).await {
        // Try once more: the version was replaced meanwhile.
        Err(Refusal::Gone(_)) => match attempt(registry, &request).await {
            Err(Refusal::Gone(what)) => Err(Refusal::Unavailable(what)),
            outcome => outcome,
        },
        outcome => outcome,
    }
}

async fn attempt(registry: &Registry, request: &PredictRequest<'_>) -> Result<(Arc<VersionInfo>, Prediction), Refusal> {
    let deployment = registry.choose(request.choice)?;
    let prepared = prepare(&deployment, request.codec, &request.body, request.deadline).await?;
    let prediction = score(&deployment, prepared, request.deadline).await?;
    Ok((deployment.info.clone(), prediction))
}

/// A body that workers can decode, and the time that reader processes took for it.
#[derive(Clone)]
pub(crate) struct PreparedBody {
    pub(crate) codec: Codec,
    pub(crate) body: Bytes,
    time: ReaderTime,
}

/// Prepares a body for the workers: lines in a user's own format are parsed by a reader process.
pub(crate) async fn prepare(
    deployment: &Deployment,
    codec: Codec,
    body: &Bytes,
    deadline: Option<Deadline>,
) -> Result<PreparedBody, Refusal> {
    let parsed = match codec {
        Codec::Text => deployment.parse_lines(body, deadline).await?,
        _ => None,
    };
    Ok(match parsed {
        Some(ParsedLines { body, time }) => PreparedBody { codec: Codec::Parsed, body, time },
        None => PreparedBody { codec, body: body.clone(), time: ReaderTime::default() },
    })
}

/// Queues a prepared body and waits for its prediction until the deadline.
pub(crate) async fn score(
    deployment: &Arc<Deployment>,
    prepared: PreparedBody,
    deadline: Option<Deadline>,
) -> Result<Prediction, Refusal> {
    let answer = deployment.submit(prepared.codec, prepared.body, prepared.time, deadline)?;
    deployment::score_soon(deployment);
    // A worker drops a request only when it panics.
    let dropped = |_| Refusal::Internal("scoring this request failed; this is a bug".into());
    match deadline {
        Some(deadline) => match tokio::time::timeout_at(deadline.at.into(), answer).await {
            Ok(answer) => answer.map_err(dropped)?,
            Err(_) => Err(deadline.refusal()),
        },
        None => answer.await.map_err(dropped)?,
    }
}
