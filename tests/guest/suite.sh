#!/usr/bin/env bash
# tests/guest/suite.sh PYTHON [short]: in the guest, for test.sh: the tests of this folder.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# Plugins are looked for in the metadata of every package: minutes, in emulation over 9p. Nothing here needs one.
# Of the tests of all transports those over rdma: tcp and local have been tested outside. Pools are registered, so small.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 FFS_TEST_TRANSPORTS=rdma FFS_NODE_POOL=$((64 << 20))
cluster=$here/test_guest_network.py rdma=$here/test_guest_rdma.py peer=$here/test_guest_peer.py
ring=$here/../integration/ring
rest=("$here" "$ring/test_ring_faults.py" "$ring/test_ring_device.py" "--ignore=$cluster" "--ignore=$peer")

run() { "$python" -m pytest -p no:cacheprovider --color=no --durations=15 -k 'guest or rdma' "$@"; }

python=$1
status=0
modprobe vgem  # whose memory stands for a device's (test_ring_device.py)
if [ "${2:-}" = short ]; then
  run "${rest[@]}" || status=1
else
  # Takes rxe0 and its link away, so it is alone. The cluster has devices of its own and mostly waits: the rest runs beside it.
  run "$rdma" || status=1
  run "$cluster" >/tmp/cluster.log 2>&1 & beside=$!
  run "${rest[@]}" "--ignore=$rdma" || status=1
  wait $beside || status=1
  cat /tmp/cluster.log
fi
if [ -e /sys/class/net/eth0 ]; then run "$peer" || status=1; fi
exit $status
