"""The storage process: control plane of one node around the native server. docs/operations.md.

config     the command line          identity   the node's directory: uuid, lock
devices    scan and format           node       registration, native server, heartbeats
collector  work on chunks for the metadata service, through a ring of its own
control    the RPC service           metrics    Prometheus over HTTP
server     wiring
"""
