"""Progress for people: a bar with time left on a terminal, plain lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(highlight=False)


@contextmanager
def progress_bar(title: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A bar for ``total`` pieces of work; the yielded function takes the pieces done and a short remark."""
    columns = (
        TextColumn(f"{title:<10}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, completed=done, remark="")
        yield lambda pieces, remark="": progress.update(task, completed=pieces, remark=remark)


def describe(numbers: dict[str, Any]) -> str:
    """One iteration in a few words."""
    scores = [f"{name} {values['mean']:.3f}" for name, values in numbers["scores"].items() if values["mean"] is not None]
    return "  ".join(scores)


def log_iteration(numbers: dict[str, Any], seconds_left: float) -> None:
    """A plain line for an iteration, where there is no terminal to draw a bar on."""
    if not console.is_terminal:
        console.print(f"iteration {numbers['iteration']}  {describe(numbers)}  {seconds_left / 60:.1f} min left", soft_wrap=True)
