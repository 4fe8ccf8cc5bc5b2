#!/usr/bin/env bash
# Long searches, each within its share of FFS_SOAK_SECONDS; every failure prints the seed that replays it.
set -euo pipefail
cd "$(dirname "$0")/.."
total=${FFS_SOAK_SECONDS:-3600}
export FFS_SOAK_SECONDS=$((total / 6))
python=.venv/bin/python

# Runs a command with a new seed each time until its share is over: until_over COMMAND... (SEED is appended).
until_over() {
  local end=$((SECONDS + FFS_SOAK_SECONDS)) seed
  while [ "$SECONDS" -lt "$end" ]; do
    seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
    "$@" "$seed" || { echo "soak: failed: $* $seed"; exit 1; }
  done
}

echo "soak: the simulator of chains, $FFS_SOAK_SECONDS s"
$python -m pytest tests/sim/test_search.py

echo "soak: a cluster of processes under kills, stops and cuts, $FFS_SOAK_SECONDS s"
$python -m pytest tests/chaos/test_chaos.py tests/chaos/test_metadata_away.py

echo "soak: the engine under crashes, under faults of its device, and beside its model with restarts, $FFS_SOAK_SECONDS s"
FFS_SOAK_SECONDS=$((FFS_SOAK_SECONDS / 3)) ./build/test/test_engine --test-case='crash soak*'

echo "soak: the namespace against its models, $FFS_SOAK_SECONDS s"
FFS_TEST_SCALE=5 until_over $python -m pytest tests/model/test_namespace_machine.py -p no:cacheprovider --hypothesis-seed

echo "soak: one call of more than 4 GiB"
FFS_BIG_CALL=$(((1 << 32) + 1)) $python -m pytest tests/integration/test_files.py -k 2_gib

echo "soak: clients that are killed, come and go, or have few descriptors"
FFS_KILLS=300 FFS_CONNECTS=10000 FFS_OPEN_FILES=100000 $python -m pytest tests/integration/test_client_limits.py

echo "soak: a directory of a million entries"
FFS_LARGE_ENTRIES=1000000 $python -m pytest -s tests/unit/metadata/test_large_directories.py -k a_large_directory

echo "soak: a client while metadata services are killed, against the model, $FFS_SOAK_SECONDS s"
FFS_FAILOVER_SECONDS=$FFS_SOAK_SECONDS $python -m pytest tests/model/test_failover.py

echo "soak: the decoders, $FFS_SOAK_SECONDS s"
FFS_SOAK_SECONDS=$((FFS_SOAK_SECONDS / 3))
for fuzzer in build/test/fuzz_*; do
  if [ -f "$fuzzer" ] && [ -x "$fuzzer" ]; then
    until_over "$fuzzer" --runs 20000 --seed
  fi
done
