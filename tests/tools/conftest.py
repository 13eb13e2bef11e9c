"""Fixtures that tool tests share."""

from tests.support.cluster import cluster

__all__ = ["cluster"]
