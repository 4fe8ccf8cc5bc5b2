"""`ffs kv`: KV spaces as caches of blocks. Each verb has its file. docs/guides/kv.md, docs/kv_tiers.md."""

from __future__ import annotations

from ffs.cli.kv_evaluate import add_evaluate
from ffs.cli.kv_spaces import add_verbs
from ffs.cli.parsing import Commands


def add_commands(commands: Commands) -> None:
    kv = commands.add_parser(
        "kv",
        help="KV-cache blocks: spaces, pins, purges, and what a cache would hit",
        description="Caches of KV blocks that inference engines share.",
    )
    kv.set_defaults(run=lambda args: _usage(kv.format_help()))
    verbs = kv.add_subparsers(dest="verb", metavar="VERB")
    add_verbs(verbs)
    add_evaluate(verbs)


def _usage(text: str) -> int:
    print(text, end="")
    return 2
