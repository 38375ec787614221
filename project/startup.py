"""Ctrl-C while the libraries are imported, which takes seconds: it ends the program at once.

A KeyboardInterrupt would be printed with a traceback through some library; or one of them would
swallow it, in a callback or where it tries whether something can be imported, and the program would
go on. To be imported before all others. `training.ending.signals_end` takes over from here.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as under nohup
    signal.signal(signal.SIGINT, signal.SIG_DFL)
