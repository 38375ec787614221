"""Counts the bytes that this process has sent over the network, by asking the kernel.

Linux keeps a count per TCP connection (TCP_INFO, `tcpi_bytes_sent`, since 4.19). The sum over the
connections of a process is exactly what it sent: unlike the counters of a network interface, it
excludes other programs. Retransmissions, which a busy machine causes, do not count.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

_SENT = struct.Struct("QQ")  # tcpi_bytes_sent, and of those tcpi_bytes_retrans
_OFFSET = 200  # of these in struct tcp_info
_LISTENING = 10


def bytes_sent() -> int:
    """Bytes of payload sent so far over the TCP connections that are open.

    Raises:
        OSError: this system does not count them.
    """
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(number))
        except OSError:  # closed meanwhile
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                total += _sent_over(sock)
    return total


def _sent_over(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if info[0] == _LISTENING:
        return 0
    if len(info) < _OFFSET + _SENT.size:
        raise OSError("this kernel does not count the bytes of a connection; Linux 4.19 does")
    sent, again = _SENT.unpack_from(info, _OFFSET)
    return int(sent - again)
