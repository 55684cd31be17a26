"""Serving: start the prediction server and follow new versions; Python clients.

`plan`, `server`, `follow`         what to serve, the server, new versions
`readers`, `reader`                processes that run a custom reader
`client`, `async_client`, `calls`  the clients, and their calls without I/O
"""
