"""Values that scripts report or combine, their history, and their JSON form."""

__all__ = ["collectives", "reported_values"]
