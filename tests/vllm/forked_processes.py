"""Lets the processes of an engine begin with vLLM imported.

On processors vLLM spawns the processes of an engine, and importing vLLM takes each of them ten seconds of processor
time. These tests fork them from a server of `multiprocessing` that has imported vLLM. The server knows nothing of
kvoffload, so each process still loads the plugin when vLLM tells it to.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from contextlib import chdir
from functools import cache
from multiprocessing import context, forkserver
from pathlib import Path
from typing import Any

IMPORTS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker")
ROOT = Path(__file__).parents[2]
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]  # private: the module keeps its state there


class ForkedProcess(context.ForkServerProcess):
    """A process with the environment of the one that starts it: the server keeps that of its own start."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        self._address = _SERVER._forkserver_address  # private: the core asks for its ranks at the same server
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        _SERVER._forkserver_address = self._address  # private: else a process starts a server of its own
        _SERVER.ensure_running = lambda: None
        super().run()


class ForkedContext(context.ForkServerContext):
    """Makes processes of this kind for those who ask `multiprocessing` for a context."""

    Process = ForkedProcess


def replace_spawned() -> None:
    """Forks all processes that vLLM spawns from now on."""
    contexts = context._concrete_contexts  # type: ignore[attr-defined]  # private: vLLM asks for `spawn` by its name
    contexts["spawn"] = ForkedContext()


@cache
def prepare_processes() -> None:
    """Starts the server, and forks all processes that vLLM spawns from now on."""
    multiprocessing.set_forkserver_preload([f"{__package__}.imported"])
    with chdir(ROOT):  # the server finds the module there
        forkserver.ensure_running()
    replace_spawned()


def import_for_all() -> None:
    """Imports in the server what all engines need."""
    for name in IMPORTS:
        importlib.import_module(name)
    replace_spawned()  # the core starts the ranks
