"""Settings of the commands: flags, environment variables and the TOML file, declared once."""

__all__ = ["command", "environment", "option_types", "options", "values"]
