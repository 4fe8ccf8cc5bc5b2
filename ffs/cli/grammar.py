"""What may stand where on a command line, read off the parser: for completion in shells and in `ffs shell`.
Pure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

REMOTE, LOCAL, EITHER, MIXED, NONE = "remote", "local", "either", "mixed", "none"
"""Of a path: in the cluster; here; here, or in the cluster after `ffs:`; either, both bare; no path."""

_KINDS = {"cp": EITHER, "sync": EITHER, "put": MIXED, "get": MIXED, "device": LOCAL, "up": NONE, "down": NONE}
_PATH_WORDS = ("PATH", "SOURCE", "TARGET", "LINK", "SPACE", "DIRECTORY")


@dataclass(frozen=True, slots=True)
class Value:
    """What follows an option: one of `choices`, or a path of this kind."""

    choices: tuple[str, ...] = ()
    kind: str = NONE


@dataclass(slots=True)
class Verb:
    """A command, or a group of them, or (named by the empty tuple) the whole."""

    options: dict[str, Value | None] = field(default_factory=dict)  # None: a flag
    verbs: dict[str, str] = field(default_factory=dict)  # and their help
    choices: tuple[str, ...] = ()  # of an operand
    kind: str = NONE


Grammar = dict[tuple[str, ...], Verb]


def read_grammar(parser: argparse.ArgumentParser) -> Grammar:
    """The grammar of a parser and all below it."""
    grammar: Grammar = {}
    _read(parser, (), grammar)
    return grammar


def _read(parser: argparse.ArgumentParser, name: tuple[str, ...], grammar: Grammar) -> None:
    verb = grammar[name] = Verb()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for sub, inner in action.choices.items():
                verb.verbs[sub] = helps.get(sub, "")
                _read(inner, (*name, sub), grammar)
        elif action.option_strings:
            if action.help != argparse.SUPPRESS:
                for option in action.option_strings:
                    verb.options[option] = None if action.nargs == 0 else _value(action)
        else:
            verb.choices = verb.choices or tuple(str(choice) for choice in action.choices or ())
            if verb.kind == NONE and any(word in str(action.metavar) for word in _PATH_WORDS):
                verb.kind = REMOTE
    if name:
        verb.kind = _KINDS.get(name[0], verb.kind)


def _value(action: argparse.Action) -> Value:
    if action.choices:
        return Value(choices=tuple(str(choice) for choice in action.choices))
    if action.type is Path or action.metavar in ("DIR", "FILE"):
        return Value(kind=LOCAL)
    return Value(kind=REMOTE if action.metavar == "PATH" else NONE)


@dataclass(frozen=True, slots=True)
class Offer:
    """What the word under the cursor may be: any of `words`, or a path of this kind."""

    words: tuple[str, ...]
    kind: str
    verb: tuple[str, ...] = ()


def offer(grammar: Grammar, before: Sequence[str], current: str) -> Offer:
    """For the word `current` after the words `before` (without the name of the program)."""
    name: tuple[str, ...] = ()
    awaits: Value | None = None
    for word in before:
        verb = grammar[name]
        if awaits is not None:
            awaits = None
        elif word.startswith("-"):
            awaits = verb.options.get(word) or grammar[()].options.get(word)
        elif word in verb.verbs:
            name = (*name, word)
    verb = grammar[name]
    if awaits is not None:
        words: tuple[str, ...] = awaits.choices
        kind = awaits.kind
    elif current.startswith("-"):
        words, kind = tuple(verb.options), NONE
    elif verb.verbs:
        words, kind = tuple(verb.verbs), NONE
    else:
        words, kind = verb.choices, verb.kind
    return Offer(tuple(word for word in words if word.startswith(current)), kind, name)
