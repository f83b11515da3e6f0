"""Scoring while the next groups are drawn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Scores = dict[str, torch.Tensor]


class Scoring:
    """A thread that scores pictures in the order in which they come; use it as a context, which waits for the thread's end.

    The scores depend on the pictures of each call alone, so it makes no difference when they are made.
    """

    def __init__(self, score: Callable[[torch.Tensor, torch.Tensor], Scores]):
        self._score = score
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._parts: list[Future[Scores]] = []

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, pictures: torch.Tensor, prompts: torch.Tensor) -> None:
        """Have these scored; returns at once."""
        self._parts.append(self._thread.submit(self._score, pictures, prompts))

    def scores(self) -> Scores:
        """Wait for all of them; raises what scoring raised."""
        parts = [part.result() for part in self._parts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
