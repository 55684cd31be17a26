//! `elasticrec._core`: the boundary between Python and Rust. No other crate depends on Python.

mod batch;
mod bench;
mod cube;
mod cube_net;
mod demo;
mod errors;
mod groups;
mod net;
mod ps;
mod samples;
mod serve;
mod table;

use pyo3::prelude::*;

/// The extension module; `python/elasticrec/_core.pyi` is its stub.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::batch::{Batch, BatchOptions, BatchReader, Parser, is_compressed, shuffle_units, split_units};
    #[pymodule_export]
    use crate::bench::serve::{TrafficReport, engine_rate, run_traffic};
    #[pymodule_export]
    use crate::bench::store::{RedisTraffic, StoreTraffic, write_bench_cube};
    #[pymodule_export]
    use crate::bench::{cube::CubeBench, table::TableBench};
    #[pymodule_export]
    use crate::cube::{CubeItems, CubeView, CubeWriter, DeltaWriter};
    #[pymodule_export]
    use crate::cube_net::{CubeClient, CubeServer, probe_cube_server};
    #[pymodule_export]
    use crate::demo::write_demo;
    #[pymodule_export]
    use crate::groups::{GeoExchange, MergedGradients};
    #[pymodule_export]
    use crate::ps::{Moment, PsClient, PsCloser, PsServer, PsTls, PullTicket, PushTicket, Staleness, read_dense_parts};
    #[pymodule_export]
    use crate::samples::{
        BatchMaker, RecordBatch, RecordReader, batch_from_parts, batch_of_columns, batch_to_parts, first_line,
        held_out, shuffle_records,
    };
    #[pymodule_export]
    use crate::serve::{Predictor, Readers, Server};
    #[pymodule_export]
    use crate::table::{Table, read_cube};
}
