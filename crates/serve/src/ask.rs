//! A request between its socket and the scorers: who answers it, until when, and that it begins again where its version
//! is gone.

use std::sync::Arc;

use bytes::Bytes;

use crate::deployment::{self, Deadline, Done};
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
    let read = match ask.face {
        Face::Text => deployment.read_lines(&ask.body, ask.deadline).await?,
        _ => None,
    };
    let (face, body, reader) = match read {
        Some(Read { body, time }) => (Face::Parsed, body, time),
        None => (ask.face, ask.body.clone(), ReaderTime::default()),
    };
    let answer = deployment.submit(face, body, reader, ask.deadline)?;
    deployment::wake_soon(&deployment);
    // a scorer that lets a request drop has panicked
    let lost = |_| Refusal::Internal("the scorer failed on this request, this is a bug".into());
    let done = match ask.deadline {
        Some(deadline) => match tokio::time::timeout_at(deadline.at.into(), answer).await {
            Ok(answer) => answer.map_err(lost)??,
            Err(_) => return Err(deadline.refusal()),
        },
        None => answer.await.map_err(lost)??,
    };
    Ok((deployment.about.clone(), done))
}
