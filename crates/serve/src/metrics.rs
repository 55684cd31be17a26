//! What the server counts, in the text that Prometheus reads.

use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// The content type of [`Metrics::encode`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Stage {
    stage: &'static str,
}

/// Buckets from 10 µs, doubling, to 5 s: a stage of one instance and a request at its limits both have a place.
#[derive(Clone)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(1e-5, 2.0, 20))
    }
}

/// All counters of a server.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Code, Counter>,
    pub(crate) instances: Counter,
    pub(crate) signs: Counter,
    pub(crate) signs_missed: Counter,
    pub(crate) request: Seen,
    pub(crate) queue: Seen,
    pub(crate) parse: Seen,
    pub(crate) lookup: Seen,
    pub(crate) infer: Seen,
    /// Requests that were scored together.
    pub(crate) joined: Histogram,
    pub(crate) model_version: Gauge,
    pub(crate) queued: Gauge,
}

/// A histogram of durations.
#[derive(Clone)]
pub(crate) struct Seen(Histogram);

impl Seen {
    pub(crate) fn observe(&self, duration: Duration) {
        self.0.observe(duration.as_secs_f64());
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let requests = Family::<Code, Counter>::default();
        let stages = Family::<Stage, Histogram, Seconds>::new_with_constructor(Seconds);
        let stage = |stage| Seen(stages.get_or_create(&Stage { stage }).clone());
        let mut metrics = Metrics {
            registry: Registry::with_prefix("elasticrec_serve"),
            requests: requests.clone(),
            instances: Counter::default(),
            signs: Counter::default(),
            signs_missed: Counter::default(),
            request: Seen(Seconds.new_metric()),
            queue: stage("queue"),
            parse: stage("parse"),
            lookup: stage("lookup"),
            infer: stage("infer"),
            joined: Histogram::new(exponential_buckets(1.0, 2.0, 11)),
            model_version: Gauge::default(),
            queued: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        // the encoder adds `_total` to the name of a counter and a full stop to its help
        registry.register("requests", "Answers by status code, without health, readiness and metrics", requests);
        registry.register("instances", "Instances scored", metrics.instances.clone());
        registry.register("signs", "Distinct signs looked up, summed over batches", metrics.signs.clone());
        registry.register("signs_missed", "Those that have no row and read as zero", metrics.signs_missed.clone());
        registry.register("request_seconds", "From the head of a prediction to its answer", metrics.request.0.clone());
        registry.register("stage_seconds", "Time in each stage: of a request, of lookup and infer of a batch", stages);
        registry.register("joined_requests", "Requests that were scored together", metrics.joined.clone());
        registry.register("model_version", "The version served, 0 before the first", metrics.model_version.clone());
        registry.register("queue", "Predictions that wait for a scorer", metrics.queued.clone());
        metrics
    }

    /// Counts an answer.
    pub(crate) fn count_answer(&self, code: u16) {
        self.requests.get_or_create(&Code { code }).inc();
    }

    /// The text of a scrape.
    pub(crate) fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
