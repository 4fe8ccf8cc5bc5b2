"""The namespace's fakes stand with its model, its world (namespace_world.py) beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "model"))
sys.path.insert(0, str(Path(__file__).parent))
