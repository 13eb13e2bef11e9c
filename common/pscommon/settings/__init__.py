"""Settings of the commands: flags, environment variables and the TOML file, declared once."""

__all__ = ["command", "environment", "options", "values"]
