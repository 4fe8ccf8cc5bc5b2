"""`ffs kv evaluate TRACE`: would a shared KV cache be worth it, how large, with which policy?
docs/kv_tiers.md, Traces. Needs no cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffs.cli.parsing import command, print_json
from ffs.cli.text import plural, table
from ffs.kv.policy.order import NAMES

if TYPE_CHECKING:
    from ffs.kv.evaluate import Report


def add_evaluate(verbs: Any) -> None:
    """The verb, below `ffs kv`."""
    evaluate = command(
        verbs, "evaluate", run, "replay a trace: what a shared KV cache would have hit", json_option=True
    )
    evaluate.add_argument(
        "trace", type=Path, metavar="FILE", help="one JSON object a line, with timestamp and hash_ids"
    )
    evaluate.add_argument(
        "--policy",
        action="append",
        choices=NAMES,
        help="only this eviction policy (may be given again; default: all)",
    )
    evaluate.add_argument(
        "--capacity",
        action="append",
        type=_share,
        metavar="PERCENT",
        help="of the different blocks (may be given again; default: 1 5 10 25 50 100)",
    )


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a percentage above 0, up to 100")
    return value


def run(args: argparse.Namespace) -> int:
    from ffs.kv.evaluate import SHARES, evaluate, read_trace

    requests = read_trace(args.trace)
    report = evaluate(requests, args.policy or NAMES, args.capacity or SHARES)
    if args.json:
        print_json(fields(report))
    else:
        print("\n".join(lines(report)))
    return 0


def fields(report: Report) -> dict[str, object]:
    """For programs. Ratios from 0 to 1."""
    return {
        "requests": report.requests,
        "blocks": report.blocks,
        "unique_blocks": report.unique,
        "shared_share": report.shared,
        "cold_share": report.cold,
        "possible_hit_ratio": report.possible,
        "worth_it": report.worth_it,
        "wanted_capacity_share": report.wanted_share,
        "replays": [
            {
                "policy": replay.policy,
                "capacity_share": replay.share,
                "capacity_blocks": replay.capacity_blocks,
                "prefix_hit_ratio": replay.hit_ratio,
            }
            for replay in report.replays
        ],
    }


def lines(report: Report) -> Iterator[str]:
    yield (
        f"{plural(report.requests, 'request')} of {plural(report.blocks, 'block')}, {report.unique} of them"
        " different"
    )
    yield f"shared     {report.shared:.1%} of blocks are of prefixes that more than one request has"
    yield f"cold       {report.cold:.1%} of blocks were never asked for before"
    yield f"possible   {report.possible:.1%} of blocks, if everything were kept"
    yield ""
    yield "prefix hit ratio, by capacity (share of the different blocks; in blocks)"
    shares = sorted({replay.share for replay in report.replays})
    policies = list(dict.fromkeys(replay.policy for replay in report.replays))
    found = {(replay.policy, replay.share): replay for replay in report.replays}
    head = ("policy", *(f"{share:.3g}".rstrip("0") if share < 0.01 else f"{share:.0%}" for share in shares))
    rows = [
        ("blocks", *(str(found[policies[0], share].capacity_blocks) for share in shares)),
        *((policy, *(f"{found[policy, share].hit_ratio:.3f}" for share in shares)) for policy in policies),
    ]
    yield table(head, rows, right=tuple(range(1, len(head))))
    yield ""
    yield verdict(report)


def verdict(report: Report) -> str:
    """Whether a shared tier is worth it, and how large."""
    if not report.worth_it:
        return (
            f"A shared tier isn't worth it for this load: it could serve {report.possible:.1%} of the blocks"
            " at most."
        )
    share = report.wanted_share
    if share is None:
        largest = max(replay.share for replay in report.replays)
        best = report.best(largest)
        return (
            f"A shared tier is worth it: up to {report.possible:.1%} of the blocks needn't be computed. Of"
            f" the capacities tried {largest:.0%} gets most, {best.hit_ratio:.1%}: try more (--capacity)."
        )
    best = report.best(share)
    return (
        f"A shared tier is worth it: {best.hit_ratio:.1%} of the blocks needn't be computed with room for"
        f" {best.capacity_blocks} blocks ({share:.0%} of the different ones, {best.policy})."
    )
