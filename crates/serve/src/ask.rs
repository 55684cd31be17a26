//! A request between its socket and the scorers: who answers it, until when, and that it begins again where its version
//! is gone.

use std::sync::Arc;

use bytes::Bytes;

use crate::deployment::{self, Deadline, Deployment, Done};
use crate::face::{About, Face};
use crate::readers::{Read, ReaderTime};
use crate::refusal::Refusal;
use crate::registry::{Choice, Registry};

/// A request, whichever protocol it came by.
pub(crate) struct Ask<'a> {
    pub(crate) choice: Choice<'a>,
    pub(crate) face: Face,
    pub(crate) body: Bytes,
    pub(crate) deadline: Option<Deadline>,
}

/// Has a request scored by the version that it gets, and says which that was.
pub(crate) async fn predict(registry: &Registry, ask: Ask<'_>) -> Result<(Arc<About>, Done), Refusal> {
    match attempt(registry, &ask).await {
        // once: by now there is another version
        Err(Refusal::Gone(_)) => match attempt(registry, &ask).await {
            Err(Refusal::Gone(what)) => Err(Refusal::Unavailable(what)),
            outcome => outcome,
        },
        outcome => outcome,
    }
}

async fn attempt(registry: &Registry, ask: &Ask<'_>) -> Result<(Arc<About>, Done), Refusal> {
    let deployment = registry.choose(ask.choice)?;
    let read = read(&deployment, ask.face, &ask.body, ask.deadline).await?;
    let done = score(&deployment, read, ask.deadline).await?;
    Ok((deployment.about.clone(), done))
}

/// A request as scorers read it, and the time that it took to get it there.
#[derive(Clone)]
pub(crate) struct Readable {
    pub(crate) face: Face,
    pub(crate) body: Bytes,
    time: ReaderTime,
}

/// Has lines read that scorers cannot read themselves.
pub(crate) async fn read(
    deployment: &Deployment,
    face: Face,
    body: &Bytes,
    deadline: Option<Deadline>,
) -> Result<Readable, Refusal> {
    let read = match face {
        Face::Text => deployment.read_lines(body, deadline).await?,
        _ => None,
    };
    Ok(match read {
        Some(Read { body, time }) => Readable { face: Face::Parsed, body, time },
        None => Readable { face, body: body.clone(), time: ReaderTime::default() },
    })
}

/// Has a request scored.
pub(crate) async fn score(
    deployment: &Arc<Deployment>,
    read: Readable,
    deadline: Option<Deadline>,
) -> Result<Done, Refusal> {
    let answer = deployment.submit(read.face, read.body, read.time, deadline)?;
    deployment::score_soon(deployment);
    // a scorer that lets a request drop has panicked
    let lost = |_| Refusal::Internal("the scorer failed on this request, this is a bug".into());
    match deadline {
        Some(deadline) => match tokio::time::timeout_at(deadline.at.into(), answer).await {
            Ok(answer) => answer.map_err(lost)?,
            Err(_) => Err(deadline.refusal()),
        },
        None => answer.await.map_err(lost)?,
    }
}
