//! A server whose workers are replaced, for the tests of every protocol.

use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;

use elasticrec_queue::{Backlog, JobQueue};

use crate::codecs::{Reply, VersionInfo};
use crate::queue::deployment::Deployment;
use crate::queue::job::{Job, Prediction, Timing};
use crate::refusal::Refusal;
use crate::server::{ModelPlan, Server, ServerHandle, ServerOptions, VariantPlan};

/// Long enough for a slow machine; only a failing test waits this long.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// The plan of a model `demo` with one variant.
pub(crate) fn demo_plan() -> ModelPlan {
    ModelPlan { name: "demo".into(), variants: vec![VariantPlan { name: String::new(), weight: 1.0 }] }
}

pub(crate) fn start(options: ServerOptions) -> ServerHandle {
    Server::start(ServerOptions { io_threads: 1, ..options }, &[demo_plan()]).unwrap()
}

/// Starts a server with a version that echoes.
pub(crate) fn start_echo(options: ServerOptions) -> ServerHandle {
    let server = start(options);
    install(&server, 3, echo);
    server
}

/// Installs a model `demo` whose only scorer is `work`.
pub(crate) fn install(server: &ServerHandle, version: u64, mut work: impl FnMut(Job) + Send + 'static) {
    let work = move |job: Job, _: &Backlog<'_, Job>| work(job);
    let queue = JobQueue::start(server.app.options.queue, vec![work]).unwrap();
    let info = Arc::new(VersionInfo::new("demo", "", version, &["click".into()]));
    let metadata = Bytes::from_static(b"{\"model\":\"demo\"}");
    let deployment = Deployment::new(info, metadata, queue, server.app.options.queue);
    server.app.metrics.of("demo", "").version.set(version as i64);
    server.app.registry.variant("demo", "").unwrap().switch(Some(Arc::new(deployment)));
}

/// Answers with the codec and the body; bodies such as `panic` and `bad` select the outcome.
pub(crate) fn echo(job: Job) {
    let Job { codec, body, answer, .. } = job;
    let outcome = match &body[..] {
        b"panic" => panic!("a planted panic"),
        b"bad" => Err(Refusal::Bad("line 1: bad".into())),
        b"many" => Err(Refusal::TooLarge("expected at most 1 lines in a request, got more".into())),
        b"nan" => Err(Refusal::Internal("sample 0: expected a finite score".into())),
        body => Ok(done(format!("{codec:?}:{}", String::from_utf8_lossy(body)))),
    };
    // Like a worker: release the body's memory before the answer is sent.
    drop(body);
    let _ = answer.send(outcome);
}

pub(crate) fn done(body: String) -> Prediction {
    Prediction { reply: Reply { body: body.into(), json_bytes: None }, timing: Timing::default() }
}

/// Installs a scorer that reports when it begins and waits for a signal before it answers.
pub(crate) fn install_gated(server: &ServerHandle) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (begun_in, begun) = mpsc::channel();
    let (go, gate) = mpsc::channel();
    install(server, 3, move |job| {
        let _ = begun_in.send(());
        if gate.recv().is_ok() {
            echo(job);
        }
    });
    (begun, go)
}

pub(crate) fn connect(server: &ServerHandle) -> TcpStream {
    let stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

pub(crate) fn poll(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
