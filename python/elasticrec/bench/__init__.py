"""`elasticrec bench`: measurements of ElasticREC, and of the limits that they are compared with.

- `commands`: the commands
- `parse`, `table`: the parser and the sparse table, on one core
- `train`, `network`: training, compared with the dense network alone
- `ps`, `ps_speed`, `ps_pull`, `ps_fault`, `cluster`, `dense_process`: training with parameter servers
- `cube`, `cube_process`, `cube_store`, `cube_versions`: lookups of a cube, and changes of versions
- `serve`, `serve_model`, `serve_rivals`, `stages`: serving, compared with ONNX Runtime and other model servers
- `processes`: CPU time of processes
- `traffic`: `bench load`, requests to a running server
- `spine`: a short measurement of parsing, training and serving
"""
