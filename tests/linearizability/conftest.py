"""Puts this folder on the path: its modules are tools, not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
