//! Counts outcomes and latencies, in memory that does not grow with the duration.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::dispatcher::{Dispatcher, DueRequest};

/// The reason a request was not answered with success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// An HTTP status other than 200.
    Status(u16),
    /// A gRPC status other than 0.
    Grpc(u32),
    /// The connection failed or broke.
    Broken,
    /// The answer did not arrive in time.
    Timeout,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Status(status) => write!(formatter, "status {status}"),
            Failure::Grpc(status) => write!(formatter, "grpc-status {status}"),
            Failure::Broken => formatter.write_str("broken connection"),
            Failure::Timeout => formatter.write_str("timeout"),
        }
    }
}

/// Percentiles of the latency in microseconds; zero without requests.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Latency {
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

/// The outcomes of one thread.
pub(super) struct Recorder {
    latencies_ns: Histogram<u64>,
    lags_ns: Histogram<u64>,
    pub(super) failures: BTreeMap<Failure, u64>,
    pub(super) late: u64,
}

/// Resolution of the histogram, and the value that longer latencies count as.
const LOWEST_NS: u64 = 1000;
const HIGHEST_NS: u64 = 3600 * 1_000_000_000;
/// Significant digits of a latency.
const DIGITS: u8 = 3;

fn histogram() -> Histogram<u64> {
    #[expect(clippy::expect_used, reason = "the bounds are valid constants")]
    Histogram::new_with_bounds(LOWEST_NS, HIGHEST_NS, DIGITS).expect("bounds of a histogram")
}

fn quantile_us(histogram: &Histogram<u64>, share: f64) -> f64 {
    histogram.value_at_quantile(share).min(histogram.max()) as f64 / 1e3
}

impl Recorder {
    pub(super) fn new() -> Self {
        Recorder { latencies_ns: histogram(), lags_ns: histogram(), failures: BTreeMap::new(), late: 0 }
    }

    /// Records that a request is sent now, on a connection that has been free since `free`.
    pub(super) fn record_sent(&mut self, request: DueRequest, free: Instant, now: Instant) {
        if !request.is_timed {
            return;
        }
        if request.due < free {
            self.late += 1;
        } else {
            self.lags_ns.saturating_record(nanos(now - request.due));
        }
    }

    /// Records an outcome. Latency counts from the due time, so requests that wait behind a slow one are slow too.
    pub(super) fn record_outcome(
        &mut self,
        request: DueRequest,
        outcome: Result<(), Failure>,
        dispatcher: &Dispatcher,
    ) {
        dispatcher.note(outcome.is_ok());
        match outcome {
            Ok(()) => self.latencies_ns.saturating_record(nanos(request.due.elapsed())),
            Err(failure) => *self.failures.entry(failure).or_default() += 1,
        }
    }

    pub(super) fn add(&mut self, other: &Recorder) {
        // Adding fails only for histograms with different bounds.
        let _ = self.latencies_ns.add(&other.latencies_ns);
        let _ = self.lags_ns.add(&other.lags_ns);
        for (&failure, count) in &other.failures {
            *self.failures.entry(failure).or_default() += count;
        }
        self.late += other.late;
    }

    pub(super) fn answered(&self) -> u64 {
        self.latencies_ns.len()
    }

    pub(super) fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    pub(super) fn latency(&self) -> Latency {
        let at = |share| quantile_us(&self.latencies_ns, share);
        Latency { p50_us: at(0.5), p90_us: at(0.9), p99_us: at(0.99), p999_us: at(0.999), max_us: at(1.0) }
    }

    pub(super) fn lag_p99_us(&self) -> f64 {
        quantile_us(&self.lags_ns, 0.99)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder_of(micros: impl IntoIterator<Item = u64>) -> Recorder {
        let mut recorder = Recorder::new();
        micros.into_iter().for_each(|us| recorder.latencies_ns.saturating_record(us * 1000));
        recorder
    }

    #[test]
    fn quantiles_cover_all_threads_and_are_exact_to_a_thousandth() {
        let mut recorder = recorder_of(1..=500);
        recorder.failures.insert(Failure::Status(429), 2);
        let mut other = recorder_of(501..=1000);
        other.failures.extend([(Failure::Status(429), 1), (Failure::Timeout, 4)]);
        other.late = 5;
        recorder.add(&other);
        let latency = recorder.latency();
        let found = [latency.p50_us, latency.p90_us, latency.p99_us, latency.p999_us, latency.max_us];
        for (us, expected) in found.into_iter().zip([500.0, 900.0, 990.0, 999.0, 1000.0]) {
            assert!((us - expected).abs() <= 0.002 * expected, "{us} for {expected}");
        }
        assert_eq!((recorder.answered(), recorder.failed(), recorder.late), (1000, 7, 5));
        assert_eq!(recorder.failures[&Failure::Status(429)], 3);
    }

    #[test]
    fn a_request_is_late_without_a_free_connection_and_lags_with_one() {
        let due = Instant::now();
        let [before, after, now] =
            [due - Duration::from_secs(1), due + Duration::from_secs(1), due + Duration::from_secs(2)];
        let mut recorder = Recorder::new();
        recorder.record_sent(DueRequest { due, is_timed: false }, before, now);
        recorder.record_sent(DueRequest { due, is_timed: true }, after, now);
        assert_eq!((recorder.late, recorder.lag_p99_us()), (1, 0.0));
        recorder.record_sent(DueRequest { due, is_timed: true }, before, now);
        assert!(recorder.late == 1 && (recorder.lag_p99_us() / 2e6 - 1.0).abs() < 0.002);
    }

    #[test]
    fn an_empty_histogram_is_zero_and_latencies_are_capped_at_an_hour() {
        assert_eq!(Recorder::new().latency().p99_us, 0.0);
        let latency = recorder_of([86_400 * 1_000_000]).latency();
        assert!((latency.max_us / 3600e6 - 1.0).abs() < 0.002, "{latency:?}");
    }
}
