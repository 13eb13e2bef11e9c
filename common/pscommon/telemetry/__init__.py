"""Logs and the HTTP endpoint for metrics and health probes."""

__all__ = ["http", "logs", "strict_json"]
