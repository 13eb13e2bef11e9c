"""Files for security: certificates, keys and tokens; how they are read, checked and made."""

__all__ = ["tls_files", "tokens"]
