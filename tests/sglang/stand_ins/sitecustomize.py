"""Stands in for torchvision, whose build for a torch with CUDA breaks imports with a CPU torch, and corrects modules
of SGLang when they are imported (`corrections`).

An engine for text imports torchvision's names and calls nothing of it: classes are empty, and everything else is
absent.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from corrections import CORRECTIONS

STANDS_FOR = "torchvision"


class _Name(type):
    """A class any attribute of which is its own name, as members of an enumeration are taken from it."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(metaclass=_Name):
    def __init_subclass__(cls, **_: object) -> None:
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            return _Name(name, (_Empty,), {})
        return importlib.import_module(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != STANDS_FOR:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


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
sys.meta_path.append(_Finder())
