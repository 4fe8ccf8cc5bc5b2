"""For all tests: how hypothesis searches."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: tests never assert times. The gate tries the same examples each time; `make soak` new ones.
settings.register_profile("ffs", deadline=None, derandomize="FFS_SOAK_SECONDS" not in os.environ)
settings.load_profile("ffs")
