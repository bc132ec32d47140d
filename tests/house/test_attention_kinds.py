"""CONTRIBUTING names the files that a new kind of attention touches. A made-up kind shows that no others are needed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule, longest_boundary, needed_blocks
from kvoffload.kvspec import GroupSpec
from kvoffload.protocol import Acquire, Invalidate
from kvoffload.types import AcquireOutcome, ReuseRule
from tests.kit.cache.cache_model import block_hashes, make_chain
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import Server

ROOT = Path(__file__).parents[2]
MOST_FILES = 8
KINDS = r"\b(LayerKind|ReuseRule|BoundaryRule)\b"
ONE_WINDOW = r"\b(LayerKind\.(SLIDING_WINDOW|CHUNKED_LOCAL)|ReuseRule\.(WINDOW|CHUNK)|BoundaryRule::(window|chunk))\b"
"""A file that names one kind of window has to be looked at for another kind of window."""
BLOCKS, HASH_TOKENS, WINDOW = 14, 16, 64


def list_recipe() -> list[str]:
    """Returns the files that the recipe names, in the order of its steps."""
    recipe = (ROOT / "CONTRIBUTING.md").read_text().split("## A new kind of attention\n")[1].split("\n## ")[0]
    return re.findall(r"^\d\. `([\w/.]+)`", recipe, re.MULTILINE)


def list_sources() -> list[Path]:
    native = (ROOT / "native/src").rglob("*.[ch]pp")
    return [*(ROOT / "kvoffload").rglob("*.py"), *(file for file in native if "bench" not in file.parts)]


def test_the_recipe_names_few_files_and_all_of_them_name_kinds() -> None:
    files = list_recipe()
    assert 0 < len(set(files)) == len(files) <= MOST_FILES
    assert [name for name in files if not re.search(KINDS, (ROOT / name).read_text())] == []


def test_no_file_beside_the_recipes_names_one_kind_of_window() -> None:
    found = {str(file.relative_to(ROOT)) for file in list_sources() if re.search(ONE_WINDOW, file.read_text())}
    assert found <= set(list_recipe())
    assert found


def load_with_made_up_kind(rule: ReuseRule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Loads the file of the layers' kinds as it would be with one more kind, which is reused by this rule."""
    text = (ROOT / "kvoffload/kvspec/spec.py").read_text()
    for line, added in [
        ('    SCRATCH = "scratch"\n', '    MADE_UP = "made_up"\n'),
        ("    LayerKind.SCRATCH: ReuseRule.NOTHING,\n", f"    LayerKind.MADE_UP: ReuseRule.{rule.name},\n"),
    ]:
        assert text.count(line) == 1
        text = text.replace(line, added + line)
    file = folder / "made_up_spec.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("made_up_spec", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "made_up_spec", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rule", [rule for rule in ReuseRule if rule.has_window])
def test_a_made_up_kind_is_described_registered_sent_and_hit_by_its_rule(
    rule: ReuseRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = load_with_made_up_kind(rule, tmp_path, monkeypatch)
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
    full = kinds.attention_layer("full", block_size=HASH_TOKENS, **heads)
    made_up = kinds.attention_layer(
        "made up", block_size=2 * HASH_TOKENS, kind=kinds.LayerKind.MADE_UP, window=WINDOW, **heads
    )
    groups = [GroupSpec(name=one.name, layers=(one,), block_size=one.block_size) for one in (full, made_up)]
    assert (groups[1].reuse_rule, groups[1].window) == (rule, WINDOW)
    rules = [GroupRule(block_size=one.block_size, reuse=one.reuse_rule, window=one.window) for one in groups]
    geometry = CacheGeometry(
        hash_block_size=HASH_TOKENS,
        groups=tuple(
            CacheGroup(rule=one, record_bytes=group.record_bytes) for one, group in zip(rules, groups, strict=True)
        ),
    )
    chain, end = make_chain(1, BLOCKS), BLOCKS * HASH_TOKENS
    names = [block_hashes(chain, geometry, group) for group in range(2)]
    needed = needed_blocks(rules[1], local=0, boundary=end)
    assert 0 < len(needed) < len(names[1])

    def is_present(group: int, block: int) -> bool:
        return group == 0 or block not in gone

    with Server() as server:
        engine = server.process().join(geometry)
        save_chain(server.cache, engine, chain, geometry)
        gone: set[int] = set()
        # First the blocks that the rule does not need, which changes nothing, then the last one that it needs.
        for lost, is_whole in [(set(range(needed.start)), True), ({needed[-1]}, False)]:
            gone |= lost
            hashes = b"".join(names[1][block] for block in sorted(lost))
            engine.tell(Invalidate(name_space=engine.name_space, group=1, hashes=hashes))
            found = engine.ask(Acquire(name_space=engine.name_space, chain=chain))
            expected = longest_boundary(rules, local=0, limit=end, is_present=is_present)
            assert (found.boundary == end) is is_whole
            assert found.boundary == expected
            assert (found.outcome is AcquireOutcome.HIT) is (expected > 0)
