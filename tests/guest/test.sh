#!/usr/bin/env bash
# tests/guest/test.sh PYTHON [short]: the tests of this folder, in a guest; short: without those of a whole cluster, which
# wait for it more than they compute (and half the time). One line where all is well; what was said, whole,
# where it isn't (also in build/guest/log). Where this machine can't have a guest: why, and success.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=$1
bash "$here/prepare.sh" || { status=$?; test $status = 75 && exit 0; exit $status; }
log=build/guest/log
# Plugins are looked for in the metadata of every package: minutes, in emulation over 9p. Nothing here needs one.
# Of the tests of all transports those over rdma: tcp and local have been tested outside. Pools are registered, so small.
settings="PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 FFS_TEST_TRANSPORTS=rdma FFS_NODE_POOL=$((64 << 20))"
tests="tests/guest tests/integration/ring/test_ring_faults.py"
test "${2:-}" != short || tests="$tests --ignore=tests/guest/test_guest_network.py"
peer=()  # a second guest costs half a minute: FFS_GUEST_PEER=1
test -z "${FFS_GUEST_PEER:-}" || peer=(--peer 'until [ -e /mnt/guest/peer-order ]; do sleep 0.2; done; . /mnt/guest/peer-order')
if python3 "$here/run.py" --seconds "${GUEST_SECONDS:-600}" "${peer[@]}" -- \
  "$settings $python -m pytest -p no:cacheprovider --color=no --durations=15 -k 'guest or rdma' $tests" >"$log" 2>&1; then
  grep -a ' passed' "$log" | sed 's/^/in the guest: /'
else
  status=$?
  cat "$log"
  echo "the tests in the guest failed (tests/guest/run.sh -- COMMAND runs one thing there)" >&2
  exit $status
fi
