"""Python imports this at its start where this folder is on its path."""

import os

if "DEVICES_WITHOUT_HARDWARE" in os.environ:
    from tests.device import install

    install(int(os.environ["DEVICES_WITHOUT_HARDWARE"]))
