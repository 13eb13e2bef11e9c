"""Logs and the HTTP endpoint for metrics and health probes."""

__all__ = ["http", "http_request", "logs", "recent_events", "strict_json"]
