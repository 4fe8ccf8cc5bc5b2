"""The floors of a case of `ffs bench io`, and the figure that comes of them (docs/guides/bench.md)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ffs.cli.benchmark.floors import FloorSpec, contestant, socket_peer
from ffs.cli.benchmark.io_matrix import IoCase
from ffs.cli.benchmark.protocol import Contestant, Round, Summary, summarise
from ffs.cli.benchmark.report import Result

ROUND_TRIPS = 1.2  # that a read may take longer than the device's


@dataclass(frozen=True, slots=True)
class Floors:
    """In the order of `names`; the first `counting` are what ffs is measured against, the others those
    without checksums."""

    names: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    counting: int


def open_floors(case: IoCase, file: Path, region_bytes: int, scratch: Path, stack: ExitStack) -> Floors:
    """Starts their peers and opens them, until `stack` closes."""

    def peer(number: int) -> str:
        """Of one connection: a peer serves them one after another."""
        if case.transport == "tcp":
            return stack.enter_context(socket_peer())
        place = scratch / f"message-{number}.sock"
        place.unlink(missing_ok=True)
        return stack.enter_context(socket_peer(place))

    def spec(number: int, what: str, crc: bool) -> FloorSpec:
        if what != "device":
            return FloorSpec(what, peer(number), case.block_bytes, case.depth, crc=crc)
        return FloorSpec(
            case.kind,
            str(file),
            case.block_bytes,
            case.depth,
            region_bytes=region_bytes,
            random=case.random,
            crc=crc,
        )

    wanted = [(what, case.crc) for what in case.floors]
    if case.crc:
        wanted += [(what, False) for what in case.floors]
    return Floors(
        tuple(what for what, _ in wanted),
        tuple(stack.enter_context(contestant(spec(i, *each))) for i, each in enumerate(wanted)),
        len(case.floors),
    )


def result_of(
    case: IoCase, rounds: Sequence[Round], floors: Floors, cost: dict[str, object], *, noisy: bool
) -> Result:
    """The case's line. Pure."""
    more: dict[str, object] = {}
    if case.op == "latency":
        summary, scale, unit = latency(case, rounds), 1.0, "us"
        names = floors.names
        per = [
            case.block_bytes / statistics.median(r.floors[i].rate for r in rounds) for i in range(len(names))
        ]
        more = {f"{name}_us": round(each * 1e6, 2) for name, each in zip(names, per, strict=True)}
    else:
        summary = summarise(rounds, case.share, only=range(floors.counting))
        scale, unit = (1 / case.block_bytes, "op/s") if case.op == "requests" else (1e-9, "GB/s")
        if floors.counting < len(floors.names):
            plain = summarise(rounds, case.share, only=range(floors.counting, len(floors.names)))
            more |= {"plain_floor": round(plain.floor * scale, 4), "plain_ratio": round(plain.ratio, 4)}
        if floors.counting > 1:
            for index, name in enumerate(floors.names[: floors.counting]):
                more[f"{name}_floor"] = round(summarise(rounds, only=[index]).floor * scale, 4)
    more = {"quartiles": [round(q, 4) for q in summary.quartiles], **cost, **more, **dimensions(case)}
    return Result(
        case.name,
        summary.ours * scale,
        summary.floor * scale,
        summary.ratio,
        unit,
        len(rounds),
        case.goal,
        goal_of=case.goal_of,
        noisy=noisy,
        more=more,
    )


def latency(case: IoCase, rounds: Sequence[Round]) -> Summary:
    """Microseconds of one request; the floor is the device's and 1.2 round trips of the socket; the ratio is
    how much of ours the floor is."""
    trip = case.floors.index("message")
    pairs = []
    for entry in rounds:
        times = [case.block_bytes / piece.rate * 1e6 for piece in (entry.ours, *entry.floors)]
        ours, floors = times[0], times[1:]
        pairs.append((ours, sum(floors) - floors[trip] + ROUND_TRIPS * floors[trip]))
    ratios = sorted(floor / ours for ours, floor in pairs)
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Summary(
        ours=statistics.median(ours for ours, _ in pairs),
        floor=statistics.median(floor for _, floor in pairs),
        ratio=statistics.median(ratios),
        quartiles=(quarters[0], quarters[2]),
    )


def dimensions(case: IoCase) -> dict[str, object]:
    return {
        "op": case.op,
        "size_bytes": case.block_bytes,
        "qd": case.depth,
        "transport": case.transport,
        "device": case.device,
        "replicas": case.replicas,
        "checksum": case.checksum,
    }
