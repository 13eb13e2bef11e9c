"""Files for security: certificates, keys and tokens; how they are read, checked and made."""

__all__ = ["certificates", "secret_files", "settings", "tls_files", "tokens"]
