"""These run in the guest of run.py (`make test-rdma`); elsewhere nothing of this folder is collected."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "chaos"))

if "FFS_GUEST" not in os.environ:
    collect_ignore_glob = ["*"]
