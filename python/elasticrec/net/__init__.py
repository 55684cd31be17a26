"""Communication between processes: security, TLS, HTTP, messages of the coordinator, placement, metrics, logging."""
