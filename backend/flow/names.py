"""Choices by name: the dynamics, solvers, log-probs and policies that a user picks from a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..errors import MixGRPOError

Entry = TypeVar("Entry")


class UnknownName(MixGRPOError):
    """A choice by a name that does not exist."""


def named(choices: Mapping[str, Entry], name: str, what: str) -> Entry:
    """The entry called ``name``.

    Raises:
        UnknownName: listing the names there are.
    """
    if name not in choices:
        raise UnknownName(f"{what} {name!r} does not exist; choose one of {', '.join(choices)}")
    return choices[name]
