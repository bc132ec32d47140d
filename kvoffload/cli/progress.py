"""The bar of whatever takes more than two seconds: on stderr, and on terminals alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, int], None]
"""What is done now, and how many steps ended since the last time."""


@contextmanager
def progress(steps: int | None) -> Iterator[Tell]:
    """Shows a bar that is gone at the end of the block. None: nobody knows how many there are."""
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
