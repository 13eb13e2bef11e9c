"""Fixtures."""

from tests.support.cluster import cluster

__all__ = ["cluster"]
