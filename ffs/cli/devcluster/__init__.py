"""A development cluster on one machine: what `ffs up` starts, and the demo, the bench and tests use.

state.py: the files in its directory. supervisor.py: the process that owns the servers. handle.py: how
other programs start and stop one. docs/guides/getting_started.md.
"""
