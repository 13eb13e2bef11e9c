"""Settings of the commands: flags, environment variables and the TOML file, declared once."""
