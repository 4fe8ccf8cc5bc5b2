"""What several tests use stands beside them: commands_world.py, wire_layouts.py, test_ior.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
