"""A training state as tensors by name and a tree of everything else, and back (docs/guides/checkpoint.md,
States). Pure: no I/O, no pickle.

A state is nested dicts, lists and tuples of tensors and plain values, and of objects with `state_dict` and
`load_state_dict`. The tree is JSON: a plain value stands for itself, all else is an object with one key:

    {"tensor": name}  {"dict": [[key, node], ...]}  {"list": [...]}  {"tuple": [...]}  {"set": [...]}
    {"stateful": node}  {"bytes": base64}  {"int": "..."}  {"float": "nan"}  {"complex": [re, im]}
    {"size": [...]}  {"dtype": "float32"}  {"device": "cuda:0"}

Integers beyond 2**53 and floats that JSON doesn't have are written as words, so any reader reads them right.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ffs.errors import Damaged, InvalidArgument

Node = Any  # JSON

_SAFE_INT = 1 << 53
_MOST_DEPTH = 200


@runtime_checkable
class Stateful(Protocol):
    """As torch.distributed.checkpoint.stateful.Stateful: modules, optimizers, loaders, schedulers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(slots=True)
class FlatState:
    """`tensors` in the order in which the state names them; `tree` is None for a flat dict of tensors."""

    tensors: dict[str, Any]
    tree: Node


def flatten(state: Any) -> FlatState:
    """Raises TypeError or InvalidArgument, which name the entry, for what can't be stored."""
    if not isinstance(state, Mapping) and not is_stateful(state):
        raise TypeError(f"a state maps names to tensors and values; this is a {type(state).__name__}")
    walk = _Walk()
    tree = walk.node((), state)
    # A dict of tensors under their own names needs no tree.
    plain = (
        not is_stateful(state)
        and len(walk.tensors) == len(tree["dict"])
        and all(
            key == name and type(key) is str
            for (key, _), name in zip(tree["dict"], walk.tensors, strict=True)
        )
    )
    return FlatState(walk.tensors, None if plain else tree)


def is_tensor(value: object) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_stateful(value: object) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


@dataclass(slots=True)
class _Walk:
    tensors: dict[str, Any] = field(default_factory=dict)

    def node(self, path: tuple[Any, ...], value: Any) -> Node:
        if len(path) > _MOST_DEPTH:
            raise InvalidArgument(
                f"the state is nested more than {_MOST_DEPTH} deep at {_words(path[:4])}...: a cycle?"
            )
        if is_tensor(value):
            return {"tensor": self._name(path, value)}
        if is_stateful(value):
            return {"stateful": self.node(path, value.state_dict())}
        if isinstance(value, Mapping):
            return {"dict": self._rows(path, value)}
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, list):
            return {"list": [self.node((*path, i), each) for i, each in enumerate(value)]}
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": [self.node((*path, i), each) for i, each in enumerate(value)]}
        if isinstance(value, (set, frozenset)):
            return {"set": [_scalar(each, path) for each in sorted(value, key=repr)]}
        return _scalar(value, path)

    def _rows(self, path: tuple[Any, ...], value: Mapping[Any, Any]) -> list[Node]:
        """Thousands of tensors by strings are the rule, and training waits: the short way for them."""
        prefix = "".join(f"{step}." for step in path)
        torch = sys.modules.get("torch")
        tensors = () if torch is None else (torch.Tensor,)
        rows: list[Node] = []
        for key, each in value.items():
            if type(key) is str and key and isinstance(each, tensors):
                name = prefix + key
                if name not in self.tensors:
                    self.tensors[name] = each
                    rows.append([key, {"tensor": name}])
                    continue
            rows.append([self._key(path, key), self.node((*path, key), each)])
        return rows

    def _name(self, path: tuple[Any, ...], value: Any) -> str:
        wanted = name = ".".join(str(step) for step in path) or "tensor"
        again = 1
        while name in self.tensors:  # {"a": {"b": x}} and {"a.b": y}
            again += 1
            name = f"{wanted}~{again}"
        self.tensors[name] = value
        return name

    def _key(self, path: tuple[Any, ...], key: Any) -> Node:
        if isinstance(key, tuple):
            return {"tuple": [self._key(path, each) for each in key]}
        if key is None or type(key) in (str, int, float, bool, bytes):
            return _scalar(key, path)
        raise TypeError(
            f"{_words(path)}: a key of type {type(key).__name__} ({key!r}): use strings or numbers"
        )


def _scalar(value: Any, path: tuple[Any, ...]) -> Node:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else {"int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [_scalar(value.real, path), _scalar(value.imag, path)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if torch is not None and isinstance(value, torch.device):
        return {"device": str(value)}
    raise TypeError(
        f"{_words(path)} is a {kind.__name__}, which a checkpoint can't hold: give tensors, plain values, "
        "or an object with state_dict and load_state_dict"
    )


def _words(path: Sequence[Any]) -> str:
    return repr(".".join(str(step) for step in path)) if path else "the state"


# --- back ------------------------------------------------------------------------------------------------


def unflatten(tree: Node, tensors: Mapping[str, Any], where: str) -> Any:
    """The state again: objects come back as what their state_dict had. Raises Damaged, naming `where`."""
    if tree is None:
        return dict(tensors)
    return _value(tree, tensors, where)


def _value(node: Node, tensors: Mapping[str, Any], where: str) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise Damaged(f"{where}: damaged: its tree has a list without a kind")
        return node
    if len(node) != 1:
        raise Damaged(f"{where}: damaged: its tree has {sorted(node)} where one kind should stand")
    ((kind, body),) = node.items()
    try:
        return _KINDS[kind](body, lambda each: _value(each, tensors, where), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{where}: damaged: its tree has an unreadable {kind!r}: {error}") from error


Back = Callable[[Node], Any]


def _torch(name: str) -> Any:
    import torch

    value = getattr(torch, name)
    if not isinstance(value, torch.dtype):
        raise ValueError(f"{name} is no element type")
    return value


def _size(body: Any) -> Any:
    import torch

    return torch.Size(body)


def _device(body: Any) -> Any:
    import torch

    return torch.device(body)


_KINDS: dict[str, Callable[[Any, Back, Mapping[str, Any]], Any]] = {
    "tensor": lambda body, back, tensors: tensors[body],
    "dict": lambda body, back, tensors: {back(key): back(each) for key, each in body},
    "list": lambda body, back, tensors: [back(each) for each in body],
    "tuple": lambda body, back, tensors: tuple(back(each) for each in body),
    "set": lambda body, back, tensors: {back(each) for each in body},
    "stateful": lambda body, back, tensors: back(body),
    "bytes": lambda body, back, tensors: base64.b64decode(body, validate=True),
    "int": lambda body, back, tensors: int(body),
    "float": lambda body, back, tensors: float(body),
    "complex": lambda body, back, tensors: complex(*(back(each) for each in body)),
    "size": lambda body, back, tensors: _size(body),
    "dtype": lambda body, back, tensors: _torch(body),
    "device": lambda body, back, tensors: _device(body),
}


def names_in(tree: Node) -> set[str]:
    """Of all tensors that the tree refers to."""
    if isinstance(tree, list):
        return set().union(*(names_in(each) for each in tree))
    if not isinstance(tree, dict):
        return set()
    if tree.keys() == {"tensor"}:
        return {tree["tensor"]}
    return set().union(*(names_in(each) for each in tree.values()))


def put_back(into: Any, tree: Node, tensors: Mapping[str, Any], where: str) -> None:
    """After the tensors of `into` were filled: its plain values become the checkpoint's, and its objects load
    their state. `tensors`: those of `into`, and for objects also what they lacked."""
    if tree is None:
        return
    if is_stateful(into):
        into.load_state_dict(_value(tree, tensors, where))
        return
    if not isinstance(tree, dict):
        return
    ((kind, body),) = tree.items()
    if kind == "dict" and isinstance(into, Mapping):
        for key_node, node in body:
            key = _value(key_node, tensors, where)
            if key not in into and not names_in(node) <= tensors.keys():
                continue  # left out, with tensors that weren't loaded
            _put_one(into, key, node, tensors, where, key in into)
    elif kind == "list" and isinstance(into, list):
        for at, node in enumerate(body):
            if at < len(into):
                _put_one(into, at, node, tensors, where, True)
            else:
                into.append(_value(node, tensors, where))
        del into[len(body) :]


def _put_one(into: Any, key: Any, node: Node, tensors: Mapping[str, Any], where: str, present: bool) -> None:
    if present:
        here, kind = into[key], next(iter(node)) if isinstance(node, dict) else ""
        if kind == "tensor" and is_tensor(here):
            return  # filled in place
        fits = (kind == "dict" and isinstance(here, Mapping)) or (kind == "list" and isinstance(here, list))
        if fits or is_stateful(here):
            put_back(here, node, tensors, where)
            return
    into[key] = _value(node, tensors, where)


# --- what only one rank has -------------------------------------------------------------------------

_OWN = re.compile(r"@\d+")


def with_rank(state: Any, rank: int, own: Any) -> Any:
    """The state with what only this rank has, under a name of its own."""
    if not isinstance(state, Mapping):
        raise TypeError("per_rank needs a state that is a dict: give {'model': model, ...}")
    taken = [key for key in state if isinstance(key, str) and _OWN.fullmatch(key)]
    if taken:
        raise InvalidArgument(f"the name {taken[0]!r} is kept for what one rank has: choose another")
    return {**state, own_name(rank): own}


def own_name(rank: int) -> str:
    return f"@{rank}"


def is_own(name: str) -> bool:
    """Whether a tensor's name is of what only one rank has."""
    return bool(_OWN.fullmatch(name.split(".", 1)[0]))


def shared_tree(tree: Node) -> Node:
    """Without what single ranks have."""
    if not isinstance(tree, dict) or "dict" not in tree:
        return tree
    rows = [[key, node] for key, node in tree["dict"] if not (isinstance(key, str) and _OWN.fullmatch(key))]
    return {"dict": rows}


def own_tree(tree: Node, rank: int) -> Node:
    """What that rank alone has; None: nothing."""
    if not isinstance(tree, dict) or "dict" not in tree:
        return None
    return next((node for key, node in tree["dict"] if key == own_name(rank)), None)


def without_prefix(tree: Node, prefix: str) -> Node:
    """The tree with this taken off the names of its tensors."""
    if isinstance(tree, list):
        return [without_prefix(each, prefix) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"tensor"}:
        return {"tensor": tree["tensor"].removeprefix(prefix)}
    return {kind: without_prefix(body, prefix) for kind, body in tree.items()}
