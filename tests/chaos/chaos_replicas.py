"""What each replica of a file's chunks holds, read from it by name."""

from __future__ import annotations

import errno

import ffs
from ffs._native.iov import Iov
from ffs._native.ring import OP_READ, Ring
from ffs.layout import file_chunk_key
from ffs.proto.cluster import TargetState


def replicas(client: ffs.Client, path: str, chunks: int) -> list[dict[int, bytes | None]]:
    """By chunk: what every serving target of its chain holds; None for no chunk. Nothing may be written
    meanwhile. Raises FfsError with the errno of a read that fails."""
    status = client.cluster_status()
    members = {
        chain.id: [m for m, s in zip(chain.members, chain.states, strict=True) if s == TargetState.SERVING]
        for chain in status.chains
    }
    found: list[dict[int, bytes | None]] = []
    with client.open(path, "rb", 0) as file:
        size = file.placement.layout.chunk_size
        iov = Iov(size)
        with Ring(client.native, 1) as ring:
            for index in range(chunks):
                chain = file.placement.chain_of_index(index)
                held: dict[int, bytes | None] = {}
                for target in members[chain]:
                    key = file.inode.to_bytes(8, "big") + file_chunk_key(index)
                    ring.prepare_one(
                        OP_READ, chain, file.capability, key, 0, size, iov[0:size], 0, target=target,
                        space_epoch=file.epoch,
                    )  # fmt: skip
                    ring.submit()
                    done, _ = ring.wait(1, 30.0)
                    while not len(done):  # it came back early, for newer routing
                        done, _ = ring.wait(1, 30.0)
                    result = int(done["result"][0])
                    if result == -errno.ENOENT:
                        held[target] = None
                    elif result < 0:
                        raise ffs.FfsError(f"target {target} of chain {chain}", path, errno=-result)
                    else:
                        held[target] = iov.numpy()[: int(done["chunk_length"][0])].tobytes()
                found.append(held)
        iov.close()
    return found


def differences(client: ffs.Client, path: str, chunks: int, replicas_wanted: int) -> list[str]:
    """Chunks whose replicas aren't all there and equal byte by byte; empty if all are well."""
    wrong = []
    for index, held in enumerate(replicas(client, path, chunks)):
        if len(held) != replicas_wanted:
            wrong.append(f"{path} chunk {index}: {len(held)} replicas serve: {sorted(held)}")
        elif len(set(held.values())) != 1:
            sizes = {target: None if data is None else len(data) for target, data in held.items()}
            wrong.append(f"{path} chunk {index}: replicas differ; lengths {sizes}")
    return wrong
