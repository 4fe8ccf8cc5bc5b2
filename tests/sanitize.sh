#!/usr/bin/env bash
# Builds every native test and fuzzer under a sanitizer and runs them: tests/sanitize.sh address,undefined | thread
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
dir=build/${kind%%,*}
make --no-print-directory .stamps/apt
cmake -G Ninja -B "$dir" -DFFS_TESTS=ON -DFFS_PYTHON=OFF -DFFS_SANITIZE="$kind" >"$dir.log" 2>&1 ||
  { cat "$dir.log"; exit 1; }
ninja -C "$dir" -j "$(nproc)" >"$dir.log" 2>&1 || { tail -50 "$dir.log"; exit 1; }
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
export ASAN_OPTIONS="detect_stack_use_after_return=1"
if [ "$kind" = thread ]; then
  # One thread on a simulated disk can't race, and takes half an hour to say so.
  threaded=$(grep -l 'Backend::\|std::thread' native/test/engine_*.cc | sed 's/.*/*&*/' | paste -sd,)
  ctest --test-dir "$dir" --output-on-failure -E '^native_engine$'
  "$dir/test_engine" -sf="$threaded"
else
  ctest --test-dir "$dir" --output-on-failure
fi
