"""The native core through cffi: the only package that uses it (tests/tidy). docs/ring.md.

Modules by topic: lib (return codes), routes, iov, ring, server, device, floor; build runs at build time.
"""
