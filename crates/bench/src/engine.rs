//! The throughput of the bare network in a loop on prepared tensors, to compare the server with.

use std::path::Path;
use std::time::{Duration, Instant};

use elasticrec_serve::model::{Chain, Engine, Network, version};
use elasticrec_serve::{EngineError, ModelError, init_onnxruntime};

/// The size and duration of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct EngineRate {
    /// Instances per run.
    pub batch: usize,
    /// Duration of the measurement.
    pub seconds: f64,
    /// Sessions side by side, each on a thread of its own.
    pub threads: usize,
}

/// Returns the instances per second through the network of the version at `path`, without parsing, lookup or pooling.
pub fn engine_rate(path: &Path, ort_library: &Path, rate: EngineRate) -> Result<f64, ModelError> {
    let dir = version::resolve(path)?;
    let engine_error = |source| ModelError::Engine { name: dir.display().to_string(), source };
    init_onnxruntime(ort_library).map_err(engine_error)?;
    let network = Network::read(&Chain::load(&dir)?)?;
    let engines =
        (0..rate.threads.max(1)).map(|_| Engine::new(&network)).collect::<Result<Vec<_>, _>>().map_err(engine_error)?;
    let shape = network.shape();
    let batch = rate.batch.max(1);
    let pooled = sample_values(batch * shape.num_cells * shape.width);
    let dense = sample_values(batch * shape.num_dense);
    let run = |mut engine: Engine| -> Result<f64, EngineError> {
        let mut scores = Vec::new();
        engine.run(batch, &pooled, &dense, &mut scores)?;
        let (started, length) = (Instant::now(), Duration::from_secs_f64(rate.seconds));
        let mut num_runs = 0;
        while started.elapsed() < length {
            scores.clear();
            engine.run(batch, &pooled, &dense, &mut scores)?;
            num_runs += 1;
        }
        Ok((num_runs * batch) as f64 / started.elapsed().as_secs_f64())
    };
    let rates: Result<f64, EngineError> = std::thread::scope(|scope| {
        let threads: Vec<_> = engines.into_iter().map(|engine| scope.spawn(|| run(engine))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).sum()
    });
    rates.map_err(engine_error)
}

/// Returns values of the magnitude of trained ones: the network runs at another speed on zeros or subnormals.
fn sample_values(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 251) as f32 / 500.0 - 0.25).collect()
}
