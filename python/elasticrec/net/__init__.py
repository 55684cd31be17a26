"""Communication between processes: security, TLS, HTTP, the protocol of the coordinator, metrics and logging."""
