"""For all tests: how hypothesis searches, and that Ctrl-C is heard."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# No deadline: tests never assert times. The gate tries the same examples each time; `make soak` new ones.
settings.register_profile("ffs", deadline=None, derandomize="FFS_SOAK_SECONDS" not in os.environ)
settings.load_profile("ffs")

# What a shell starts in the background ignores SIGINT, and so would all programs that tests start and
# interrupt: those tests would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
