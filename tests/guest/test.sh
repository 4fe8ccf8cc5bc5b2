#!/usr/bin/env bash
# tests/guest/test.sh PYTHON [short]: the tests of this folder, in a guest (suite.sh); short: without those of a whole cluster,
# which take half as long again. A line or two where all is well; what was said, whole,
# where it isn't (also in build/guest/log). Where this machine can't have a guest: why, and success.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=$1
bash "$here/prepare.sh" || { status=$?; test $status = 75 && exit 0; exit $status; }
log=build/guest/log
peer=()  # a second guest costs half a minute: FFS_GUEST_PEER=1
test -z "${FFS_GUEST_PEER:-}" || peer=(--peer 'until [ -e /mnt/guest/peer-order ]; do sleep 0.2; done; . /mnt/guest/peer-order')
if python3 "$here/run.py" --seconds "${GUEST_SECONDS:-900}" "${peer[@]}" -- \
  bash "$here/suite.sh" "$python" "${2:-}" >"$log" 2>&1; then
  grep -a ' passed' "$log" | sed 's/^/in the guest: /'
else
  status=$?
  cat "$log"
  echo "the tests in the guest failed (tests/guest/run.sh -- COMMAND runs one thing there)" >&2
  exit $status
fi
