"""A long context read back block by block: paged by demand against prefetch by block index.

    ffs up --detach --dir cluster && export FFS_CLUSTER=...
    python examples/long_context.py --tokens 80000

A decoder whose KV cache doesn't fit in the device's memory reads all of it for each token that it makes. The
context is synthetic, of a 7B model with grouped heads (32 layers, 8 KV heads of 128, 2 bytes: 128 KiB a
token); of them `--layers` are kept, 4 by default, so that it fits anywhere: 80,000 tokens are 1.2 GiB.

1. paged: what is needed is asked for a page at a time (`--page`, 64 KiB as a GPU's driver has them), and the
   loop waits for each: that is what a page fault does. Then the same with a whole block as the page.
2. prefetch: the order of need is known - block 0, 1, 2 and so on - so blocks are asked for ahead
   (ffs.kv.tiers).
3. int8: the same with values in eight bits, keys kept (ffs.kv.int8): a quarter less to move, and decoded on
   arrival.

Each block is copied to where the device would have it, and checked. What is printed is tokens of context a
second, from blocks in the cluster: none is in this process's memory when it is asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

import ffs
from ffs import kv
from ffs.kv import int8
from ffs.kv.tiers import Outcome, Settings, TierManager

KV_HEADS, HEAD_DIM, VALUE_BYTES = 8, 128, 2
BATCH = 64

Block = npt.NDArray[np.uint8]
Take = Callable[[int, Block], None]


def context_blocks(count: int, nbytes: int) -> Iterator[Block]:
    """Synthetic blocks of 16-bit floats, each another; the first value says which."""
    base = np.random.default_rng(7).standard_normal(nbytes // 2).astype(np.float16)
    for number in range(count):
        block = np.roll(base, number)
        block[0] = np.uint16(number % 30_000).view(np.float16)
        yield block.view(np.uint8)


def store(space: kv.Space, keys: list[bytes], blocks: Iterator[Block]) -> None:
    """Unless they are there."""
    if space.exists_many(keys).leading_hits() == len(keys):
        return
    for begin in range(0, len(keys), BATCH):
        some = keys[begin : begin + BATCH]
        space.put_many(some, [next(blocks) for _ in some]).raise_errors()


def check(device: Block, number: int) -> None:
    """That it is the block which was asked for. Its first value is one of keys, which stay as they are."""
    if int.from_bytes(device[:2].tobytes(), "little") != number % 30_000:
        raise SystemExit(f"block {number} is another one")


def paged(space: kv.Space, keys: list[bytes], block: ffs.Iov, page_bytes: int, take: Take) -> None:
    """One page after another, each when it is needed."""
    memory = block.numpy()
    size = space.block_bytes
    pages = [
        (offset, min(page_bytes, size - offset), block[offset : min(offset + page_bytes, size)])
        for offset in range(0, size, page_bytes)
    ]
    for number, key in enumerate(keys):
        for offset, length, place in pages:
            if space.get_many([key], [place], offset=offset, length=length).leading_hits() != 1:
                raise SystemExit(
                    f"block {number} isn't there: is the cluster's device too small for all of them?"
                )
        take(number, memory)


def prefetched(tiers: TierManager, keys: list[bytes], take: Take) -> None:
    """The same blocks in the same order, asked for ahead."""
    with tiers.prefetch(keys) as stream:
        for block in stream:
            if block.outcome is not Outcome.HIT or block.memory is None:
                raise SystemExit(f"block {block.position}: {block.outcome.name} {block.error or ''}")
            take(block.position, np.frombuffer(block.memory.view, dtype=np.uint8))


def tiers_over(space: kv.Space, host_bytes: int) -> TierManager:
    """Plain LRU and less memory than the context has: read in a circle, no block is ever still there."""
    return TierManager(
        Settings(block_bytes=space.block_bytes, host_bytes=host_bytes, policy="lru"), space=space
    )


def best_of(times: int, work: Callable[[], None]) -> float:
    """Seconds. A first round, which isn't counted, brings memory into use."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cluster", help="host:port of the metadata service (default: FFS_CLUSTER)")
    parser.add_argument("--tokens", type=int, default=80_000)
    parser.add_argument("--layers", type=int, default=4, help="of 32")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--page", type=int, default=64 << 10, help="bytes of a page fault (default: 65536)")
    parser.add_argument("--host-memory", type=int, default=64 << 20, help="bytes, for what is prefetched")
    parser.add_argument("--transport", choices=("auto", "tcp", "local"), default="auto")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many is printed")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    shape = int8.BlockShape(
        layers=options.layers,
        tokens=options.block_tokens,
        heads=KV_HEADS,
        head_size=HEAD_DIM,
        dtype="float16",
    )
    block_bytes = shape.plain_bytes
    count = options.tokens // options.block_tokens
    tokens = count * options.block_tokens
    layout = f"{options.layers} layers"
    identity = kv.Identity("synthetic-7b", layout=layout, dtype="float16", block_tokens=options.block_tokens)
    keys = kv.hash_tokens(identity, np.arange(tokens) % 32_000)
    print(
        f"{tokens} tokens: {count} blocks of {block_bytes >> 10} KiB"
        f" ({count * block_bytes / (1 << 30):.1f} GiB, {options.layers} of 32 layers)"
    )
    device = np.zeros(block_bytes, dtype=np.uint8)

    def plain(number: int, block: Block) -> None:
        np.copyto(device, block)
        check(device, number)

    def coded(number: int, block: Block) -> None:
        int8.decode(shape, block, device)
        check(device, number)

    def in_eight_bits(blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            out = np.zeros(shape.coded_bytes, dtype=np.uint8)
            int8.encode(shape, block, out)
            yield out

    path = f"/examples/long-context-{options.layers}-{options.block_tokens}"
    with ffs.connect(options.cluster, transport=options.transport) as client:
        # One copy: what is lost is computed again.
        with kv.Space.create(client, path, block_bytes=block_bytes, replicas=1, exist_ok=True) as space:
            store(space, keys, context_blocks(count, block_bytes))
            block = ffs.Iov(block_bytes)
            slow = best_of(options.repeat, lambda: paged(space, keys, block, options.page, plain))
            print(f"paged            {tokens / slow:12,.0f} tokens/s   1.0   pages of {options.page} bytes")
            whole = best_of(options.repeat, lambda: paged(space, keys, block, block_bytes, plain))
            print(f"paged by block   {tokens / whole:12,.0f} tokens/s  {slow / whole:4.1f}")
            with tiers_over(space, options.host_memory) as tiers:
                fast = best_of(options.repeat, lambda: prefetched(tiers, keys, plain))
                counts = tiers.stats().counts
            told = f"{counts.space.most_loads_in_flight} in flight, {counts.host_hits} found in memory"
            print(f"prefetch         {tokens / fast:12,.0f} tokens/s  {slow / fast:4.1f}   {told}")
        with kv.Space.create(
            client, f"{path}-int8", block_bytes=shape.coded_bytes, replicas=1, exist_ok=True
        ) as space:
            store(space, keys, in_eight_bits(context_blocks(count, block_bytes)))
            with tiers_over(space, options.host_memory) as tiers:
                least = best_of(options.repeat, lambda: prefetched(tiers, keys, coded))
            print(f"prefetch + int8  {tokens / least:12,.0f} tokens/s  {slow / least:4.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
