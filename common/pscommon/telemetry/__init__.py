"""Logs, the HTTP endpoint for metrics and health probes, and the order of workers in views."""

__all__ = ["http", "http_request", "logs", "recent_events", "strict_json", "worker_rows"]
