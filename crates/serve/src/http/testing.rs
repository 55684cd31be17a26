//! A server whose scorers are played by tests, for those of every protocol.

use std::sync::Arc;

use bytes::Bytes;

use crate::deployment::{Deployment, Done, Job, Timing};
use crate::face::{About, Reply};
use crate::pool::{Pool, Waiting};
use crate::refusal::Refusal;
use crate::registry::ModelPlan;
use crate::server::{Server, ServerHandle, ServerOptions};

pub(crate) fn start(options: ServerOptions) -> ServerHandle {
    Server::start(ServerOptions { io_threads: 1, ..options }, &[ModelPlan::alone("demo")]).unwrap()
}

/// Installs a model `demo` whose one scorer is `work`.
pub(crate) fn install(server: &ServerHandle, version: u64, mut work: impl FnMut(Job) + Send + 'static) {
    let work = move |job: Job, _: &Waiting<'_, Job>| work(job);
    let pool = Pool::start(server.app.options.queue, vec![work]).unwrap();
    let about = Arc::new(About::new("demo", "", version, &["click".into()]));
    let metadata = Bytes::from_static(b"{\"model\":\"demo\"}");
    let deployment = Deployment::new(about, metadata, pool, server.app.options.queue);
    server.app.metrics.of("demo", "").version.set(version as i64);
    server.app.registry.place("demo", "").unwrap().switch(Some(Arc::new(deployment)));
}

/// Answers with the body; `panic` and `bad` do what they say.
pub(crate) fn echo(job: Job) {
    let Job { face, body, answer, .. } = job;
    let outcome = match &body[..] {
        b"panic" => panic!("a planted panic"),
        b"bad" => Err(Refusal::Bad("line 1: bad".into())),
        b"many" => Err(Refusal::TooLarge("expected at most 1 lines a request, got more".into())),
        b"nan" => Err(Refusal::Internal("sample 0: expected a finite score".into())),
        body => Ok(done(format!("{face:?}:{}", String::from_utf8_lossy(body)))),
    };
    // as scorers do it: its memory is free before it is answered
    drop(body);
    let _ = answer.send(outcome);
}

pub(crate) fn done(body: String) -> Done {
    Done { reply: Reply { body: body.into(), json_bytes: None }, timing: Timing::default() }
}
