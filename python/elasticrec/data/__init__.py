"""Data: demo logs, and the units that files are cut into."""
