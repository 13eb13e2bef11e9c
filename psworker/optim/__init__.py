"""The torch optimizer of a job, and the strategies by which its steps reach the servers."""

__all__ = ["optimizer", "schedulers", "step_strategies"]
