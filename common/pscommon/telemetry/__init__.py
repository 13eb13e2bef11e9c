"""Logs and the HTTP endpoint for metrics and health probes."""
