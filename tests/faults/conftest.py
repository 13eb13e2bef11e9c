"""Fixtures that fault tests share."""

from tests.support.cluster import cluster

__all__ = ["cluster"]
