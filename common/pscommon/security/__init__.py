"""Files for security: certificates, keys and tokens; how they are read, checked and made."""

__all__ = [
    "certificates",
    "credentials",
    "secret_files",
    "settings",
    "tls",
    "tls_files",
    "tokens",
]
