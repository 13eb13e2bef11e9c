"""Values that scripts report, their history, and their JSON form."""

__all__ = ["reported_values"]
