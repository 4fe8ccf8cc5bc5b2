"""What `ffs bench` runs: the protocol (protocol.py), floors, cases, cost (docs/guides/bench.md)."""
