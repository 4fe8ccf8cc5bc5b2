"""The one decoder knows every message, in whichever file of ffs.proto it stands."""

from __future__ import annotations

import importlib
import pkgutil

import ffs.proto
from ffs.proto.common import Message
from ffs.rpc.codec import message_classes


def below(cls: type[Message]) -> set[type[Message]]:
    return {cls}.union(*(below(one) for one in cls.__subclasses__()))


def test_no_message_is_unknown_to_the_decoder() -> None:
    for module in pkgutil.iter_modules(ffs.proto.__path__):
        importlib.import_module(f"ffs.proto.{module.name}")
    messages = {
        cls
        for cls in below(Message)
        if cls.__module__.startswith("ffs.proto.") and cls.__struct_config__.tag is not None
    }
    assert len(messages) > 100
    assert set(message_classes()) == messages
