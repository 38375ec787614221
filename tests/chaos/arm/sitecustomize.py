"""Python imports this at its start where this folder is on its path.

It lets a process be made to fail from within, at a moment chosen outside: after SIGUSR2 the next
forward of any module, on whatever thread, fails in the way that CHAOS_FAILURE names, and just
before it does, makes the file CHAOS_BLOWN.
"""

import os
import signal
import sys
import threading
import time
from typing import Any


def blow(*_: Any) -> None:
    """Fails, on the one thread that comes first."""
    if not first.acquire(blocking=False):
        return
    os.close(os.open(os.environ["CHAOS_BLOWN"], os.O_WRONLY | os.O_CREAT))
    failure = os.environ["CHAOS_FAILURE"]
    if failure == "raise":
        raise ArithmeticError("on purpose")
    if failure == "exit":
        sys.exit(0)
    raise KeyboardInterrupt("on purpose")


def arm() -> None:
    """Sets the trap, once there is something to set it on."""
    while not hasattr(sys.modules.get("torch.nn"), "Module"):
        time.sleep(0.01)
    sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(blow)


if "CHAOS_FAILURE" in os.environ:
    first = threading.Lock()
    signal.signal(signal.SIGUSR2, lambda *_: threading.Thread(target=arm, daemon=True).start())
