"""Do hits survive on a machine that is not idle? Real vLLM engines with default settings, each in its own processes.

Prompts of 2,000 tokens are asked and, after a reset of the engine's own cache, asked again: with quotas of processors
for engine and server together, next to processes that spin, and with a server that is throttled or stopped. Engines
start with their quota, and are ready when other loads begin. It needs vllm and transformers, and root for quotas.
Run: python -m benchmarks.busy
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.busy.repeats import Repeats, ask_repeats, read_steps, reset
from benchmarks.ending import end_in_order
from kvoffload.errors import BenchmarkError
from tests.kit.busy_machine import CpuGroup, spinning, stopping
from tests.vllm.cache_server import SharedServer
from tests.vllm.http_service import UNCHANGED, USERS_ARGUMENTS, Service, list_users_environment, serving_with
from tests.vllm.tiny_models import DENSE

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("idle", "quota 2", "quota 1", "quota 0.5", "spinning 2", "spinning 4", "spinning 8")
"""The cases that concern the whole machine. Each has an engine of its own."""
SERVERS_OWN = ("server's quota 0.1", "20 stops of 0.1 s", "10 stops of 1 s", "3 stops of 10 s")
"""The cases that concern the server alone, on the engine of the idle machine."""
KINDS = ("private", "shared", "none")
"""Where the engine's server is; none: the engine has no connector."""
PATIENCE = 5.0
SCHEDULER = "benchmarks.busy.timed_scheduler.TimedScheduler"


class Runner:
    """Measures cases, each with prompts of its own: no case finds what another one has saved."""

    def __init__(self, folder: Path, *, prompts: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._prompts = prompts
        self._say = say
        self._cases = 0

    def measure(self, machine: str, kind: str, own: tuple[str, ...]) -> Iterator[Repeats]:
        """Measures a machine's case with a new engine, and then `own`, the cases of its server. BenchmarkError: it
        cannot be had here."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        word, _, amount = machine.partition(" ")
        group = CpuGroup("all")
        with ExitStack() as stack:
            load = stack.enter_context(ExitStack())
            if word == "quota":
                stack.enter_context(group.limited_to(float(amount)))
                load.callback(group.limit, None)
            service = stack.enter_context(self._serve(folder, kind, group.enter if word == "quota" else ()))
            stack.callback(load.close)  # the engine ends without the load, and so in time
            if word == "spinning":
                load.enter_context(spinning(int(amount)))
            yield self._ask(service, folder, machine, kind)
            for case in own:
                yield self._measure_own(service, folder, case, kind)

    def _measure_own(self, service: Service, folder: Path, case: str, kind: str) -> Repeats:
        reset(service)
        server = read_steps(folder / "steps")[-1]["server"]
        if not server:
            raise BenchmarkError(f"{case}: the engine has no server", remedy="measure on a quieter machine")
        if "stops" in case:
            count, _, _, seconds, _ = case.split()
            with stopping(server, seconds=float(seconds), count=int(count)) as stops:
                return self._ask(service, folder, case, kind, lambda: not stops.is_alive())
        group = CpuGroup("server")
        with group.limited_to(float(case.removeprefix("server's quota "))), group.holding(server):
            return self._ask(service, folder, case, kind)

    @contextmanager
    def _serve(self, folder: Path, kind: str, enter: tuple[str, ...]) -> Iterator[Service]:
        model = self._folder / "model"
        if not model.exists():
            DENSE.build(model)
        environment = list_users_environment()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        arguments: tuple[str, ...] = USERS_ARGUMENTS
        connector: dict[str, object] | None = None
        with SharedServer(folder, enter=enter) as server:
            if kind != "none":
                config = json.dumps({"steps_file": str(folder / "steps")})
                arguments += ("--scheduler-cls", SCHEDULER, "--additional-config", config)
                connector = {**UNCHANGED}
            if kind == "shared":
                server.start()
                connector = {**UNCHANGED, "kv_connector_extra_config": {"server": str(server.socket)}}
            with serving_with(
                environment, model, folder / "log", *arguments, connector=connector, enter=enter, patience=PATIENCE
            ) as service:
                yield service

    def _ask(
        self, service: Service, folder: Path, case: str, kind: str, is_over: Callable[[], bool] = lambda: True
    ) -> Repeats:
        self._say(f"{case}, server: {kind}")
        self._cases += 1
        numbers = {"prompts": self._prompts, "seed": 10_000 * self._cases}
        return ask_repeats(service, folder / "steps", case=case, server=kind, is_over=is_over, **numbers)


def measure(folder: Path, cases: tuple[str, ...], kinds: tuple[str, ...], prompts: int) -> Iterator[Repeats]:
    """Measures the cases, each with every kind of server in turn. What cannot be had here is skipped by name."""
    runner = Runner(folder, prompts=prompts, say=_say)
    for machine in MACHINES:
        own = tuple(case for case in SERVERS_OWN if case in cases and machine == "idle")
        for kind in kinds if machine in cases or own else ():
            try:
                yield from runner.measure(machine, kind, own if kind != "none" else ())
            except BenchmarkError as fault:
                _say(f"{machine}, server: {kind}: skipped: {fault}")


def make_table(rows: list[Repeats]) -> Table:
    """Makes a line for each case and server. Times are in milliseconds, two of them the median and the longest."""
    names = ("cold", "hit", "miss", "hooks a request", "of it CPU", "longest hooks", "longest wait", "waits > 1 ms")
    table = Table("case", "server", "restored", "why not", *names, "load")
    for row in rows:
        why = ", ".join(f"{reason} {count}" for reason, count in row.reasons.items())
        pairs = [f"{median:.0f}, {longest:.0f}" for median, longest in (row.cold, row.hit, row.miss)]
        thread = [row.hooks, row.hooks_cpu, row.longest_hooks, row.longest_wait, row.long_waits]
        share = f"{row.restored} of {row.asked}"
        table.add_row(row.case, row.server, share, why, *pairs, *map(str, thread), f"{row.load:.1f}")
    return table


def main() -> int:
    cases = (*MACHINES, *SERVERS_OWN)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--cases", default=",".join(cases), help=f"with commas between; all: {', '.join(cases)}")
    parser.add_argument("--servers", default=",".join(KINDS), help="some of them, with commas between")
    parser.add_argument("--prompts", type=int, default=20, help="that are repeated in each case, at least")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    chosen, kinds = tuple(options.cases.split(",")), tuple(options.servers.split(","))
    if unknown := sorted({*chosen, *kinds} - {*cases, *KINDS}):
        parser.error(f"not known: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, end_in_order)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), chosen, kinds, options.prompts):
            rows.append(row)
            if options.json:
                print(json.dumps(asdict(row)), flush=True)
    if not options.json:
        Console(width=None if sys.stdout.isatty() else 200).print(make_table(rows))
    return 0


def _say(step: str) -> None:
    print(f"busy: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
