"""Values and rules that servers and workers share.

The modules are pure: no clock, thread, socket, file, log or random number.
"""

__all__ = [
    "data_loop",
    "data_stream",
    "entry_encoding",
    "errors",
    "exit_codes",
    "formats",
    "limits",
    "log_entries",
    "metric_row",
    "model_spec",
    "partition",
    "script_place",
]
