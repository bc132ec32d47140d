"""`kvoffload bench`: runs benchmarks and prints each result with the machine's limit."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.bench import BENCHMARKS
from kvoffload.bench.base import Benchmark, Result
from kvoffload.cli.progress import progress
from kvoffload.errors import BenchmarkError, ConfigError


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of benchmarks; without names all of them run.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML page with bars, too.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="With `copy`: print the way that each plan takes on this GPU, and why.")
    ] = False,
) -> None:
    """Measure against this machine's limits. Exit code 0 whatever is met, 1 where one that was named could not run."""
    if explain:
        _explain(names or [], as_json)
        return
    if report is not None:
        # Now, and not when all has been measured.
        _write_report(report, "")
    chosen = [_find(name) for name in names] if names else list(BENCHMARKS)
    results: list[Result] = []
    for result in measure(chosen, is_each_wanted=bool(names)):
        results.append(result)
        if as_json:
            typer.echo(json.dumps(result.as_json()))
    if report is not None:
        from kvoffload.bench.report import describe_machine, render_report

        questions = {benchmark.name: benchmark.question for benchmark in chosen}
        _write_report(report, render_report(results, questions, describe_machine()))
    if not as_json:
        # A pipe has no width; a table cut to rich's 80 columns would hide the numbers.
        Console(width=None if sys.stdout.isatty() else 160).print(make_table(results))


def measure(chosen: list[Benchmark], *, is_each_wanted: bool) -> Iterator[Result]:
    """Measures with a bar on a terminal. A benchmark that cannot run here is a line, or else the end."""
    with progress(len(chosen)) as tell:
        for benchmark in chosen:
            try:
                yield from benchmark.run(lambda step, name=benchmark.name: tell(f"{name}: {step}", 0))  # type: ignore[misc]
            except BenchmarkError as fault:
                if is_each_wanted:
                    raise
                typer.echo(f"{benchmark.name} was not measured: {fault}", err=True)
            tell("", 1)


def _write_report(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as fault:
        raise ConfigError(
            f"--report {file} cannot be written: {fault.strerror}", remedy="name a file in a folder of yours"
        ) from None


def _explain(names: list[str], as_json: bool) -> None:
    if names != ["copy"]:
        raise ConfigError("--explain is about the ways of copying", remedy="say `kvoffload bench copy --explain`")
    from kvoffload.bench.explain import explain_ways, find_gpu_calibration

    calibration = find_gpu_calibration()
    rows = explain_ways(calibration.timings)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    table = Table(title=f"{calibration.key.gpu}, CUDA {calibration.key.driver}", box=None, header_style="bold")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column in ("direction", "way") else "right")
    for row in rows:
        table.add_row(
            *("" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values())
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _find(name: str) -> Benchmark:
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
    raise ConfigError(f"no benchmark is called {name!r}", remedy=hint)


def make_table(results: list[Result]) -> Table:
    """Makes the table that is printed without `--json`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("benchmark", "parameters", "value", "limit", "unit", "ratio", "spread", "goal", "met"):
        table.add_column(column, justify="right" if column in ("value", "limit", "ratio", "spread") else "left")
    for result in results:
        table.add_row(
            result.name,
            " ".join(f"{name}={value}" for name, value in result.params.items()),
            f"{result.value:.4g}",
            f"{result.limit:.4g}",
            result.unit,
            f"{result.ratio:.3f}",
            f"{result.spread:.1%}",
            "" if result.goal is None else str(result.goal),
            {None: "", True: "yes", False: "no"}[result.is_met],
        )
    return table
