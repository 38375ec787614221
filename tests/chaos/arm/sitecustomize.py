"""Python imports this at its start where this folder is on its path.

It lets a process be made to fail from within, at a moment chosen outside: after SIGUSR1 the next
forward of any module, on whatever thread, fails in the way that CHAOS_FAILURE names, and just
before it does, makes the file CHAOS_BLOWN. And it counts: rank 0 of torchrun's writes a byte for
each step of an optimizer to the file CHAOS_STEPS.
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
    if failure == "interrupt":
        raise KeyboardInterrupt("on purpose")
    os._exit(0)


def wait_for(module: str, name: str) -> None:
    """Until the program has imported it."""
    while not hasattr(sys.modules.get(module), name):
        time.sleep(0.01)


def count() -> None:
    """Writes in one piece, at once: the next moment the process may be gone."""
    file = os.open(os.environ["CHAOS_STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    wait_for("torch.optim", "AdamW")
    hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook
    hook(lambda *_: os.write(file, b"."))


def arm() -> None:
    """Sets the trap, once there is something to set it on."""
    wait_for("torch.nn", "Module")
    sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(blow)


if "CHAOS_FAILURE" in os.environ:
    first = threading.Lock()
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=arm, daemon=True).start())
if "CHAOS_STEPS" in os.environ and os.environ.get("RANK") == "0":
    threading.Thread(target=count, daemon=True).start()
