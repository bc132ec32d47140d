"""Corrects modules when they are imported (`corrections`). The environment of `make sglang` imports this at each
start."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from corrections import CORRECTIONS


class _Corrector(importlib.abc.MetaPathFinder):
    """Finds modules as the others do, and corrects them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in CORRECTIONS:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.loader is None:
            return found
        load = found.loader.exec_module

        def load_and_correct(module: types.ModuleType) -> None:
            load(module)
            CORRECTIONS[fullname](module)

        found.loader.exec_module = load_and_correct  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, _Corrector())
