"""Source text with which a process reports whether it reuses large buffers."""

MAPPED = """
import ctypes

def mapped():
    "Return whether malloc maps separate memory for a large buffer, unmapped when it is freed."
    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    before = mallinfo().e  # bytes in mapped buffers
    buffer = bytes(64 << 20)
    return mallinfo().e - before >= len(buffer)
"""
"""Source text that needs glibc 2.33. mapped() is true under glibc's default settings, whose mmap
threshold is at most 32 MiB.
"""
