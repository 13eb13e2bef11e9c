"""A network of this process's own, in which there is only the loopback interface. Linux.

For peers whose servers listen on all interfaces and cannot be told otherwise. Standard library
only.
"""

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def enter() -> None:
    """For a process without threads so far; its children are born there. OSError where the
    system forbids it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "no network namespace of its own")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        (found,) = struct.unpack_from("16xH", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", found | IFF_UP))
