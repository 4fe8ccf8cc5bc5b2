#!/usr/bin/env bash
# Builds the wheel, installs it into an environment of its own and uses it from a folder that
# has no sources: what a user gets must work without this tree.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" -m pip -q --disable-pip-version-check wheel --no-build-isolation --no-deps \
  -C build-dir="$root/build/wheel" -w "$work" "$root" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$root/.venv/bin/python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -q --disable-pip-version-check install "$work"/ffs-*.whl \
  >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cp "$root/tests/wheel/use.py" "$work/use.py"
cd "$work"
"$work/venv/bin/python" -W error "$work/use.py"
