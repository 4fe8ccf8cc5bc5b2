#!/usr/bin/env bash
# Long searches, each within its share of FFS_SOAK_SECONDS; every failure prints the seed that replays it.
set -euo pipefail
cd "$(dirname "$0")/.."
total=${FFS_SOAK_SECONDS:-3600}
share=$((total / 4))
export FFS_SOAK_SECONDS=$share
echo "soak: simulator, $share s"
.venv/bin/python -m pytest tests/sim
echo "soak: engine under crashes, $share s"
./build/test/test_engine --test-case='*crash*'
echo "soak: namespace against its models, $share s"
.venv/bin/python -m pytest tests/model tests/crash
echo "soak: decoders, $share s"
for fuzzer in build/test/fuzz_*; do
  [ -x "$fuzzer" ] && [ -f "$fuzzer" ] || continue
  "$fuzzer" --seconds $((share / 4)) --seed "$(date +%s)"
done
