"""What the tests of the manager's chains wait for and look at."""

from __future__ import annotations

from collections.abc import Iterable

from manager_world import Process, SimNode, until

from metadata.cluster.members import serving_of


async def until_states(process: Process, beating: Iterable[SimNode], *letters: str) -> None:
    """Until the members' states of every chain, sorted, are one of these: s serving, y syncing, o offline."""
    beating = list(beating)

    async def there() -> bool:
        for node in beating:
            await node.beat(process)
        states = {"".join("osy"[s] for s in c.states) for c in process.routing.view.chains.values()}
        return states <= set(letters)

    await until(there)


def serving_nodes(process: Process, chain: int) -> set[int]:
    view = process.routing.view
    return {view.targets[target].node for target in serving_of(view.chains[chain])}
