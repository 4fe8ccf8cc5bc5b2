"""The control plane's transport: frames without I/O, a server and two askers. docs/control_plane.md.

frame      frames, no I/O                 handshake  hello and authentication, no I/O
codec      bodies <-> messages            address    host:port
server     asyncio, many requests a read  aio        asyncio, many in flight
blocking   threads, shared connections, failover, fork-safe
"""
