"""Data: files to units to batches, and the commands that inspect, convert and split files.

In the order of the data path:

- `hours`: which hour of a directory of hours is trained next
- `units`: splits files into units and records them
- `header`: reads the column names of CSV files
- `batches`: opens the reader for the format of a job: Rust threads for text, `parquet`, or `reader_processes`
- `parquet`: row groups of Parquet files to batches
- `reader`, `reader_processes`, `reader_worker`: a custom reader, run in processes

Commands and their parts:

- `commands`: `elasticrec data`
- `raw_lines`: lines of data files before parsing
- `checks`, `collisions`: warnings about a job's data for `check` and `init`
- `init/`: detects what data files contain and writes a first job
- `stats/`: `data stats`
- `convert/`: `data convert` and `data split`
- `demo`: `data demo`
"""
