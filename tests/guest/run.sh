#!/usr/bin/env bash
# tests/guest/run.sh [options] -- COMMAND...: run.py, after what it needs has been brought here (75: it can't be).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/prepare.sh"
exec python3 "$here/run.py" "$@"
