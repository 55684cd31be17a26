//! The server's metrics, in the text format of Prometheus.

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
struct AnswerLabels {
    protocol: &'static str,
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VariantLabels {
    model: String,
    /// Empty if the model has one variant.
    variant: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    model: String,
    variant: String,
    stage: &'static str,
}

/// Buckets from 10 µs to 5 s, doubling: they cover a stage of one instance and a request at its limits.
#[derive(Clone)]
struct DurationBuckets;

impl MetricConstructor<Histogram> for DurationBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(1e-5, 2.0, 20))
    }
}

/// Buckets for the number of requests that are scored together.
#[derive(Clone)]
struct RequestBuckets;

impl MetricConstructor<Histogram> for RequestBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(1.0, 2.0, 11))
    }
}

/// All metrics of a server.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<AnswerLabels, Counter>,
    instances: Family<VariantLabels, Counter>,
    signs: Family<VariantLabels, Counter>,
    signs_missed: Family<VariantLabels, Counter>,
    signs_lost: Family<VariantLabels, Counter>,
    pub(crate) request: DurationHistogram,
    stages: Family<StageLabels, Histogram, DurationBuckets>,
    joined: Family<VariantLabels, Histogram, RequestBuckets>,
    version: Family<VariantLabels, Gauge>,
    offered: Family<VariantLabels, Gauge>,
    load_failures: Family<VariantLabels, Counter>,
    queued: Family<VariantLabels, Gauge>,
    readers: Family<VariantLabels, Gauge>,
    reader_losses: Family<VariantLabels, Counter>,
    pub(crate) pending_bytes: Gauge,
}

/// The metrics of a variant of a model.
#[derive(Clone)]
pub(crate) struct ModelMetrics {
    pub(crate) instances: Counter,
    pub(crate) signs: Counter,
    pub(crate) signs_missed: Counter,
    pub(crate) signs_lost: Counter,
    pub(crate) queue: DurationHistogram,
    pub(crate) parse: DurationHistogram,
    pub(crate) reader: DurationHistogram,
    pub(crate) lookup: DurationHistogram,
    pub(crate) infer: DurationHistogram,
    pub(crate) write: DurationHistogram,
    pub(crate) joined: Histogram,
    pub(crate) version: Gauge,
    pub(crate) offered: Gauge,
    pub(crate) load_failures: Counter,
    pub(crate) queued: Gauge,
    pub(crate) readers: Gauge,
    pub(crate) reader_losses: Counter,
}

/// A histogram of durations.
#[derive(Clone)]
pub(crate) struct DurationHistogram(Histogram);

impl DurationHistogram {
    pub(crate) fn observe(&self, duration: Duration) {
        self.0.observe(duration.as_secs_f64());
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("elasticrec_serve"),
            requests: Family::default(),
            instances: Family::default(),
            signs: Family::default(),
            signs_missed: Family::default(),
            signs_lost: Family::default(),
            request: DurationHistogram(DurationBuckets.new_metric()),
            stages: Family::new_with_constructor(DurationBuckets),
            joined: Family::new_with_constructor(RequestBuckets),
            version: Family::default(),
            offered: Family::default(),
            load_failures: Family::default(),
            queued: Family::default(),
            readers: Family::default(),
            reader_losses: Family::default(),
            pending_bytes: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        // The encoder adds `_total` to the name of a counter and a full stop to its help.
        let help = "Answers by protocol and code, without health, readiness and metrics";
        registry.register("requests", help, metrics.requests.clone());
        registry.register("instances", "Instances scored", metrics.instances.clone());
        registry.register("signs", "Signs looked up; with a store, each sign of a batch once", metrics.signs.clone());
        registry.register(
            "signs_missed",
            "Signs looked up that have no row; they read as zero",
            metrics.signs_missed.clone(),
        );
        let help = "Signs looked up whose shard did not answer; they read as zero";
        registry.register("signs_lost", help, metrics.signs_lost.clone());
        registry.register(
            "request_seconds",
            "Time from the headers of a prediction to its answer",
            metrics.request.0.clone(),
        );
        let help = "Time in each stage; lookup and infer per batch, the others per request";
        registry.register("stage_seconds", help, metrics.stages.clone());
        registry.register("joined_requests", "Requests scored together in a batch", metrics.joined.clone());
        registry.register("model_version", "The version in use, 0 before the first", metrics.version.clone());
        registry.register("offered_version", "The version that should be served", metrics.offered.clone());
        registry.register("load_failures", "Failed attempts to load a version", metrics.load_failures.clone());
        registry.register("queue", "Queued predictions", metrics.queued.clone());
        registry.register("readers", "Reader processes that are running", metrics.readers.clone());
        let help = "Reader processes that died, hung or returned invalid data";
        registry.register("reader_losses", help, metrics.reader_losses.clone());
        let help = "Bytes of in-flight requests and answers";
        registry.register("pending_bytes", help, metrics.pending_bytes.clone());
        metrics
    }

    /// Returns the metrics of a variant.
    pub(crate) fn of(&self, model: &str, variant: &str) -> ModelMetrics {
        let labels = VariantLabels { model: model.into(), variant: variant.into() };
        let stage = |stage| {
            DurationHistogram(self.stages.get_or_create_owned(&StageLabels {
                model: model.into(),
                variant: variant.into(),
                stage,
            }))
        };
        ModelMetrics {
            instances: self.instances.get_or_create_owned(&labels),
            signs: self.signs.get_or_create_owned(&labels),
            signs_missed: self.signs_missed.get_or_create_owned(&labels),
            signs_lost: self.signs_lost.get_or_create_owned(&labels),
            queue: stage("queue"),
            parse: stage("parse"),
            reader: stage("reader"),
            lookup: stage("lookup"),
            infer: stage("infer"),
            write: stage("write"),
            joined: self.joined.get_or_create_owned(&labels),
            version: self.version.get_or_create_owned(&labels),
            offered: self.offered.get_or_create_owned(&labels),
            load_failures: self.load_failures.get_or_create_owned(&labels),
            queued: self.queued.get_or_create_owned(&labels),
            readers: self.readers.get_or_create_owned(&labels),
            reader_losses: self.reader_losses.get_or_create_owned(&labels),
        }
    }

    /// Counts an answer.
    pub(crate) fn count_answer(&self, protocol: &'static str, code: u16) {
        self.requests.get_or_create(&AnswerLabels { protocol, code }).inc();
    }

    /// Returns the text of a scrape.
    pub(crate) fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
