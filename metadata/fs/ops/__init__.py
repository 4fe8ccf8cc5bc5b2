"""The operations of the namespace, by topic: what each checks, in Linux's order, and then what it writes.

An operation gets the core, a snapshot or a transaction, and the request. It raises before its first write or
not at all, since a batch goes on with its other entries. It may run several times (metadata/kv/contract.py).
"""
