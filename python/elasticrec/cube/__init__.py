"""The online store: processes that hold the rows of published versions in memory and answer lookups.

`commands` is the command line, `node` one process, `loader` loads and unloads versions, `http` is the HTTP API,
`lookup` the client of `cube get`.
"""
