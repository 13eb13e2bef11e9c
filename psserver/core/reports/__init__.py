"""Values that scripts report, their history, and their form in JSON."""

__all__ = ["reported_values"]
