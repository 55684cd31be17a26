//! The dense network: ONNX Runtime on one thread, from pooled rows and dense values to scores.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use elasticrec_wire::lock;
use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{Session, SessionInputValue};
use ort::value::{Outlet, TensorElementType, TensorRef, ValueType};
use thiserror::Error;

use crate::model::chain::{Chain, Step};
use crate::model::manifest::Manifest;

/// The reason a graph cannot be loaded or run.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum EngineError {
    #[error("onnxruntime: {}: {what}", path.display())]
    Library { path: PathBuf, what: String },
    #[error("onnxruntime: already loaded from {}, cannot load {}", loaded.display(), path.display())]
    OtherLibrary { loaded: PathBuf, path: PathBuf },
    #[error("onnxruntime: not loaded yet, call `init_onnxruntime` first")]
    NotLoaded,
    #[error("graph: {0}")]
    Graph(String),
    #[error("onnxruntime: {0}")]
    Runtime(#[from] ort::Error),
}

/// The library and its environment, one of each per process.
struct Runtime {
    path: PathBuf,
    environment: Environment,
}

static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);

/// Loads the ONNX Runtime library at `path`; a second call with the same path does nothing.
pub fn init_onnxruntime(path: &Path) -> Result<(), EngineError> {
    let failed = |what: String| EngineError::Library { path: path.into(), what };
    let mut runtime = lock(&RUNTIME);
    // `ort` resolves a relative path against the directory of the executable.
    let absolute = path.canonicalize().map_err(|error| failed(error.to_string()))?;
    if let Some(Runtime { path: loaded, .. }) = &*runtime {
        if *loaded == absolute {
            return Ok(());
        }
        return Err(EngineError::OtherLibrary { loaded: loaded.clone(), path: absolute });
    }
    let builder = ort::init_from(&absolute).map_err(|error| failed(error.to_string()))?;
    let environment = builder.with_name("elasticrec").with_telemetry(false).build()?;
    environment.set_log_level(LogLevel::Error);
    *runtime = Some(Runtime { path: absolute, environment });
    Ok(())
}

fn environment() -> Result<Environment, EngineError> {
    let runtime = lock(&RUNTIME);
    runtime.as_ref().map(|runtime| runtime.environment.clone()).ok_or(EngineError::NotLoaded)
}

/// The sizes of the inputs and outputs of one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Number of cells.
    pub num_cells: usize,
    /// Values in a cell.
    pub width: usize,
    /// Dense values.
    pub num_dense: usize,
    /// Scores.
    pub num_labels: usize,
}

impl Shape {
    /// Returns the shape of a manifest.
    pub fn of(manifest: &Manifest) -> Shape {
        let features = &manifest.features;
        Shape {
            num_cells: features.num_cells(),
            width: manifest.table.width(),
            num_dense: features.dense.len(),
            num_labels: manifest.labels().len(),
        }
    }
}

/// The files of a network, checked and in memory, to build engines from.
#[derive(Clone)]
pub struct Network {
    graph: Arc<[u8]>,
    /// Name and bytes of the file with the graph's weights.
    weights_name: String,
    weights: Arc<[u8]>,
    inputs: Vec<Input>,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    /// `[num_samples, num_cells, width]`
    Pooled,
    /// `[num_samples, num_dense]`
    Dense,
}

impl Input {
    fn name(self) -> &'static str {
        match self {
            Input::Pooled => "pooled",
            Input::Dense => "dense",
        }
    }
}

impl Network {
    /// Reads and checks the graph and the weights of a version; a delta has the graph of its base.
    pub fn read(chain: &Chain) -> Result<Network, crate::ManifestError> {
        let (base, Step { manifest, dir }) = (chain.base(), chain.newest());
        let inputs = &manifest.graph.inputs;
        Ok(Network {
            graph: base.manifest.read(&base.dir, &manifest.graph.file)?.into(),
            weights_name: manifest.dense.file.clone(),
            weights: manifest.read(dir, &manifest.dense.file)?.into(),
            // The manifest was checked to have only these two names.
            inputs: inputs.iter().map(|name| if name == "pooled" { Input::Pooled } else { Input::Dense }).collect(),
            shape: Shape::of(manifest),
        })
    }

    /// Returns the sizes of the inputs and outputs of one sample.
    pub fn shape(&self) -> Shape {
        self.shape
    }
}

/// A session of ONNX Runtime that runs on the calling thread; each worker has its own.
pub struct Engine {
    session: Session,
    inputs: Vec<Input>,
    shape: Shape,
}

impl Engine {
    /// Builds the session and checks the graph's inputs and outputs.
    pub fn new(network: &Network) -> Result<Engine, EngineError> {
        let session = build(&environment()?, network)?;
        let engine = Engine { session, inputs: network.inputs.clone(), shape: network.shape };
        engine.check()?;
        Ok(engine)
    }

    fn check(&self) -> Result<(), EngineError> {
        let Shape { num_cells, width, num_dense, num_labels } = self.shape;
        let names: Vec<&str> = self.session.inputs().iter().map(Outlet::name).collect();
        let expected: Vec<&str> = self.inputs.iter().map(|input| input.name()).collect();
        if names != expected {
            return Err(EngineError::Graph(format!("inputs: expected {expected:?} as in the manifest, got {names:?}")));
        }
        for (input, outlet) in self.inputs.iter().zip(self.session.inputs()) {
            match input {
                Input::Pooled => check_outlet("input", outlet, &[None, Some(num_cells), Some(width)])?,
                Input::Dense => check_outlet("input", outlet, &[None, Some(num_dense)])?,
            }
        }
        match self.session.outputs() {
            [scores] if scores.name() == "scores" => check_outlet("output", scores, &[None, Some(num_labels)]),
            others => {
                let names: Vec<&str> = others.iter().map(Outlet::name).collect();
                Err(EngineError::Graph(format!("outputs: expected [\"scores\"], got {names:?}")))
            }
        }
    }

    /// Runs the network on `num_samples` (at least 1) samples and appends `[num_samples, num_labels]` to `scores`.
    pub fn run(
        &mut self,
        num_samples: usize,
        pooled: &[f32],
        dense: &[f32],
        scores: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        let Shape { num_cells, width, num_dense, num_labels } = self.shape;
        let inputs = self.inputs.iter().map(|input| {
            // Views, so that the runtime reads the caller's buffers.
            let tensor = match input {
                Input::Pooled => TensorRef::from_array_view(([num_samples, num_cells, width], pooled))?,
                Input::Dense => TensorRef::from_array_view(([num_samples, num_dense], dense))?,
            };
            Ok(SessionInputValue::from(tensor))
        });
        let inputs = inputs.collect::<ort::Result<Vec<_>>>()?;
        let outputs = self.session.run(inputs.as_slice())?;
        let (shape, values) = outputs[0].try_extract_tensor::<f32>()?;
        if **shape != [num_samples as i64, num_labels as i64] {
            let got: &[i64] = shape;
            return Err(EngineError::Graph(format!(
                "scores: expected shape [{num_samples}, {num_labels}], got {got:?}"
            )));
        }
        scores.extend_from_slice(values);
        Ok(())
    }
}

fn build(environment: &Environment, network: &Network) -> ort::Result<Session> {
    Session::builder(environment)?
        .with_intra_threads(1)?
        .with_inter_threads(1)?
        .with_parallel_execution(false)?
        .with_optimization_level(GraphOptimizationLevel::All)?
        // A pattern would be kept for each batch size, and made no measurable difference.
        .with_memory_pattern(false)?
        .with_external_initializer_file_in_memory(&network.weights_name, network.weights.clone())?
        .commit_from_memory(&network.graph)
}

/// Checks the type and the known dimensions of an input or output.
fn check_outlet(what: &str, outlet: &Outlet, expected: &[Option<usize>]) -> Result<(), EngineError> {
    let wrong = |got: String| {
        let expected = expected.iter().map(|size| size.map_or("batch".into(), |size| size.to_string()));
        let expected = expected.collect::<Vec<_>>().join(", ");
        let name = outlet.name();
        Err(EngineError::Graph(format!("{what} `{name}`: expected f32 [{expected}], got {got}")))
    };
    let ValueType::Tensor { ty: TensorElementType::Float32, shape, .. } = outlet.dtype() else {
        return wrong(format!("{:?}", outlet.dtype()));
    };
    let agrees = shape.len() == expected.len()
        && shape.iter().zip(expected).all(|(&got, size)| match size {
            // -1 is a dimension that the graph leaves open
            Some(size) => got < 0 || got == *size as i64,
            None => got < 0,
        });
    if agrees { Ok(()) } else { wrong(format!("f32 {:?}", &shape[..])) }
}
