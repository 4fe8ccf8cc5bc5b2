"""ffs's KV blocks against other stores of them, in the same run (docs/guides/bench.md, ffs bench peers)."""
