"""Staying connected to a job: discovery, membership with heartbeats, and retries."""
