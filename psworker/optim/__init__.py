"""The torch optimizer that a script holds, and the strategies by which its steps reach the
servers.
"""

__all__ = ["optimizer", "schedulers"]
