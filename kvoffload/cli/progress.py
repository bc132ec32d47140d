"""The bar of whatever takes more than two seconds: on stderr, and on terminals alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, int], None]
"""A call that reports the step at work, and how many steps ended since the last call."""


@contextmanager
def progress(steps: int | None) -> Iterator[Tell]:
    """Shows a bar that is gone at the end of the block. None: the number of steps is unknown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    # Without `disable` a pipe gets an empty line at the end.
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_interactive
    ) as bar:
        task = bar.add_task("", total=steps)

        def tell(doing: str, ended: int = 0) -> None:
            bar.update(task, description=doing, advance=ended)

        yield tell
