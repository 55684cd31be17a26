"""Serving: starting the server, and asking one."""
