"""The tools of this folder (chaos_*.py) and the checker stand on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "linearizability"))
