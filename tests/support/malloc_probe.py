"""Source text with which a process reports the effect of --malloc."""

MAPPED = """
import ctypes

def mapped():
    "Has malloc mapped memory for one large buffer alone, to be unmapped when it is freed?"
    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    before = mallinfo().e  # bytes in mapped buffers
    buffer = bytes(64 << 20)
    return mallinfo().e - before >= len(buffer)
"""
"""Source text. Needs glibc 2.33, and is true for its own settings: it never keeps more than 32
MiB in one piece.
"""
