"""The cluster: nodes, chains, tables, routing, the primary's lease. docs/control_plane.md.

chain        pure: what to do with a chain, given its members' reports
placement    pure: which targets form the chains of a table
lease        the primary's lease; clock: manager time
schema       keys and records in the store
routing      what this process knows of the cluster (any process), and who waits for a change
registry     transactions: registering nodes, announcing, making tables
manager      the primary: heartbeats, decisions, fences; node_config: what a node is told; status
chain_port   the namespace's work on chunks, sent to storage processes
"""
