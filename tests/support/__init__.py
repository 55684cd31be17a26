"""Helpers that tests share: real processes, servers, disks, and small data sets."""
