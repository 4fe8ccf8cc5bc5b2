"""`python -m ffs`: the command `ffs`."""

import sys

from ffs.cli import main

sys.exit(main())
