"""The model repository: versions of a model in any storage.

`version`                                  number, directory and manifest of a version
`repository`                               versions of one model, CURRENT, offer, rollback, pins
`storage`, `local`, `remote`, `http`       storage on a disk, behind fsspec, over HTTP; `files` is the HTTP server
`lock`                                     one writer at a time
`find`, `fetch`, `pack`                    from MODEL on the command line to files on this machine
`store_source`                             the model of an online store, from the command line or a job file
`verify`, `diff`, `collect`                checks, comparison, garbage collection
`commands`, `tables`, `rows`               `elasticrec models`
"""
