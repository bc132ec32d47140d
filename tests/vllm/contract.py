"""Compares our classes with what the installed vLLM has them subclass, and with how it calls them.

Pure: classes and source text go in, complaints come out, each with the name of what it is about. Nothing is started.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CONNECTORS = re.compile(r"(?<![A-Za-z_])(?:kv_)?connector(?:_cls)?$|(?<![A-Za-z_])(?:get_)?kv_transfer_group(?:\(\))?$")
"""Names that vLLM gives a connector, its class, or a worker's connector, but not an encoder cache's."""
ITSELF = re.compile(r"^self$")
_GIVEN = object()


def find_kind(owner: type, name: str) -> str:
    """Returns the kind of an attribute, where it is defined."""
    found = inspect.getattr_static(owner, name)
    for kind in (classmethod, staticmethod, property):
        if isinstance(found, kind):
            return kind.__name__
    return "method" if callable(found) else "attribute"


def public_names(owner: type) -> set[str]:
    """Lists the public names of a class and its bases, without those that every object has."""
    return {name for base in owner.__mro__ if base is not object for name in vars(base) if not name.startswith("_")}


def complain_of_shapes(
    ours: type,
    bases: Sequence[type],
    *,
    own: Set[str] = frozenset(),
    inherited: Set[str] = frozenset(),
    is_made_by_vllm: bool = False,
) -> list[str]:
    """Lists the differences of a class of ours and vLLM's bases. `own` are names of ours that no base knows,
    `inherited` hooks that we leave as they are."""
    complaints = [f"{name}: abstract, and not ours" for name in sorted(getattr(ours, "__abstractmethods__", ()))]
    offered = set().union(*map(public_names, bases))
    mine = {name for name in vars(ours) if not name.startswith("_")}
    complaints += [f"{name}: no hook of vLLM's" for name in sorted(mine - offered - own)]
    complaints += [f"{name}: a hook that nobody has decided about" for name in sorted(offered - mine - inherited)]
    for name in sorted(mine & offered) + ["__init__"] * is_made_by_vllm:
        complaints += _compare(name, ours, next(base for base in bases if hasattr(base, name)))
    return complaints


def _compare(name: str, ours: type, base: type) -> list[str]:
    mine, theirs = find_kind(ours, name), find_kind(base, name)
    if mine != theirs:
        return [f"{name}: a {theirs}, ours is a {mine}"]
    if mine in ("property", "attribute"):
        return []
    return [f"{name}: {why}" for why in _compare_parameters(_parameters(ours, name), _parameters(base, name))]


def _parameters(owner: type, name: str) -> list[inspect.Parameter]:
    """Returns parameters without `self` and `cls`."""
    found = list(inspect.signature(getattr(owner, name)).parameters.values())
    return found[1:] if find_kind(owner, name) == "method" else found


def _compare_parameters(ours: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> Iterator[str]:
    """Compares parameters: a call that vLLM's own method allows must be possible with ours."""
    takes_more = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in ours)
    takes_names = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in ours)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    mine = [one for one in ours if one.kind not in variadic]
    for at, one in enumerate(theirs):
        if one.kind in variadic:
            if not (takes_more if one.kind is inspect.Parameter.VAR_POSITIONAL else takes_names):
                stars = "*" if one.kind is inspect.Parameter.VAR_POSITIONAL else "**"
                yield f"ours takes no {stars}{one.name}"
            continue
        at_its_place = mine[at].name if at < len(mine) else ""
        if at_its_place == one.name:
            if one.default is not one.empty and mine[at].default is one.empty:
                yield f"argument {one.name} has a default, ours has none"
        elif not (takes_more and takes_names and at >= len(mine)):
            yield f"argument {one.name} is not at its place in ours"
    known = {one.name for one in theirs}
    for one in mine:
        if one.name not in known and one.default is one.empty:
            yield f"ours wants {one.name}, which nobody gives"


@dataclass(frozen=True)
class Call:
    """A place where vLLM uses an attribute of a connector."""

    name: str
    line: int
    positional: int
    """Arguments given by their place; -1: the attribute is read and not called, or they cannot be counted."""
    named: tuple[str, ...] = ()


def find_calls(source: str, receivers: re.Pattern[str] = CONNECTORS) -> list[Call]:
    """Finds calls in the order of their lines."""
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not receivers.search(ast.unparse(node.value)):
            continue
        call = called.get(id(node))
        if call is None or any(isinstance(given, ast.Starred) for given in call.args):
            calls.append(Call(node.attr, node.lineno, -1))
            continue
        named = tuple(one.arg for one in call.keywords if one.arg is not None)
        is_countable = len(named) == len(call.keywords)
        calls.append(Call(node.attr, node.lineno, len(call.args) if is_countable else -1, named))
    return sorted(calls, key=lambda call: (call.line, call.name))


def complain_of_calls(
    ours: type,
    sources: Mapping[str, str],
    expected: Mapping[str, Sequence[str]],
    *,
    receivers: re.Pattern[str] = CONNECTORS,
) -> list[str]:
    """`sources` by their paths; `expected`: in which of them each hook of ours is called; `receivers`: names that the
    engine gives to an object of ours."""
    calls = {path: find_calls(source, ITSELF if path == BASE else receivers) for path, source in sources.items()}
    complaints = []
    for name, paths in sorted(expected.items()):
        complaints += [
            f"{name}: {path} does not call it any more"
            for path in paths
            if not any(call.name == name for call in calls.get(path, ()))
        ]
    mine = {name for name in vars(ours) if not name.startswith("_")}
    for path, found in sorted(calls.items()):
        for call in found:
            if call.name in mine:
                complaints += [f"{call.name}: {path}:{call.line} {why}" for why in _misfits(ours, call)]
    return complaints


def _misfits(ours: type, call: Call) -> Iterator[str]:
    kind = find_kind(ours, call.name)
    if call.positional < 0:
        return
    if kind in ("property", "attribute"):
        yield f"calls it, ours is a {kind}"
        return
    signature = inspect.Signature(_parameters(ours, call.name))
    try:
        signature.bind(*[_GIVEN] * call.positional, **dict.fromkeys(call.named, _GIVEN))
    except TypeError as fault:
        yield f"calls it with what ours does not take ({fault})"


def complain_of_notes(source: str, *, maker: str, noted_by: str) -> list[str]:
    """Lists faults of a function `maker` that makes models: each one has to be noted by `noted_by` where it was
    made."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == maker]
    if not found:
        return [f"{maker}: there is none"]
    blocks = [body for node in ast.walk(found[0]) if isinstance(body := getattr(node, "body", None), list)]
    made = [
        (body[at:], target.id, line.lineno)
        for body in blocks
        for at, line in enumerate(body)
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call)
        for target in line.targets
        if isinstance(target, ast.Name) and ast.unparse(line.value.func) == "model_class"
    ]
    complaints = [] if made else [f"{maker}: makes no model_class"]
    for rest, name, line in made:
        if not any(ast.unparse(after) == f"{noted_by}({name})" for after in rest):
            complaints.append(f"{maker}: {line} makes a model that {noted_by} does not hear of")
    return complaints


def read_sources(package: Path, paths: Set[str]) -> dict[str, str]:
    """Those of them that there are."""
    return {path: (package / path).read_text() for path in sorted(paths) if (package / path).exists()}


def find_version(package: Any) -> tuple[int, int]:
    """The first two numbers of a release."""
    major, minor, *_ = str(package.__version__).split(".")
    return int(major), int(minor)
