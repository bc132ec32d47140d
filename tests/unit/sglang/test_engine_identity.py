"""Ranks whose pages differ have different names, and a rank that is started again has its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload.errors import IdentityError
from kvoffload.sglang.engine_identity import (
    OF_ONE_START,
    VARIABLES_OF_ONE_START,
    describe_arguments,
    identify_rank,
    resolve_arguments,
)
from kvoffload.sglang.pools import describe_pool
from tests.kit.sglang.pools import PAGE, MHATokenToKVPool, MLATokenToKVPool

VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1"}


class Fields:
    """Arguments, as SGLang declares them in a class above its own."""

    model_path: str
    revision: str | None
    tp_size: int
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    json_model_override_args: str
    quantization: str | None
    port: int
    nccl_port: int | None
    random_seed: int | None
    log_level: str
    _resolved: bool


class Arguments(Fields):
    def __init__(self, **given: object) -> None:
        self.revision = self.quantization = self.nccl_port = self.random_seed = self.lora_paths = None
        self.tp_size, self.port, self._resolved = 1, 30000, False
        self.dtype, self.kv_cache_dtype, self.attention_backend = "bfloat16", "auto", "torch_native"
        self.json_model_override_args, self.log_level = "{}", "info"
        for name, value in given.items():
            setattr(self, name, value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def name(
    model: Path | str,
    *,
    pool: Any = None,
    rank: int = 0,
    version: str = "0.5.23",
    variables: Mapping[str, str] = VARIABLES,
    **given: object,
) -> bytes:
    pool = pool or MHATokenToKVPool()
    geometry = describe_pool(pool, page_size=pool.page_size).geometry
    arguments = Arguments(**{"model_path": str(model), **given})
    return identify_rank(
        arguments, geometry, version=version, dtype=pool.dtype, rank=rank, variables=variables
    ).fingerprint()


def test_a_rank_that_is_started_again_has_the_same_name(model: Path) -> None:
    assert name(model) == name(model, port=1, nccl_port=7, random_seed=99, log_level="error", _resolved=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 1},
        {"variables": VARIABLES | {"SGLANG_USE_AITER": "1"}},
        {"variables": VARIABLES | {"SGLANG_WHATEVER_COMES_NEXT": "1"}},
        {"variables": {}},
        {"tp_size": 2},
        {"version": "0.5.24"},
        {"pool": MHATokenToKVPool(heads=4)},
        {"pool": MHATokenToKVPool(dtype=torch.float16)},
        {"pool": MHATokenToKVPool(page_size=2 * PAGE)},
        {"pool": MHATokenToKVPool(start_layer=2)},
        {"pool": MLATokenToKVPool()},
        {"attention_backend": "other"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1}'},
    ],
    ids=str,
)
def test_whatever_pages_depend_on_is_in_the_name(model: Path, changed: dict[str, Any]) -> None:
    assert name(model) != name(model, **changed)


@pytest.mark.parametrize(
    "more", [*VARIABLES_OF_ONE_START, "SGLANG_LOG_MS", "SGLANG_PROFILE_V2", "SGLANG_CUDA_COREDUMP_DIR", "LANG"]
)
def test_variables_of_one_start_are_not_in_the_name(model: Path, more: str) -> None:
    assert name(model) == name(model, variables=VARIABLES | {more: "x"})


def test_how_many_pages_there_are_is_not(model: Path) -> None:
    assert name(model) == name(model, pool=MHATokenToKVPool(size=64))


def test_other_weights_at_the_same_place_are_another_model(model: Path) -> None:
    before = name(model)
    (model / "model.safetensors").write_bytes(b"heavier")
    assert name(model) != before


def test_what_an_adapter_holds_is_in_the_name(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"light")
    adapter = SimpleNamespace(lora_name="a", lora_path=str(folder), lora_id="1")
    before = name(model, lora_paths=[adapter])
    assert before == name(model, lora_paths=[adapter])
    assert before != name(model)
    assert before != name(model, lora_paths=[SimpleNamespace(lora_name="b", lora_path=str(folder), lora_id="1")])
    (folder / "adapter_model.safetensors").write_bytes(b"heavy")
    assert before != name(model, lora_paths=[adapter])
    with pytest.raises(IdentityError, match="cannot read who/adapter"):
        name(model, lora_paths=[SimpleNamespace(lora_name="a", lora_path="who/adapter", lora_id="1")])


@pytest.mark.parametrize("form", ["{0}", "a={0}", "a", "dict", "two"])
def test_adapters_are_read_in_every_form_that_they_are_given_in(model: Path, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"light")
    path = str(folder)
    given: Any = [form.format(path)]
    if form == "a":
        given = {"a": path}
    elif form == "dict":
        given = [{"lora_name": "a", "lora_path": path}]
    elif form == "two":
        given = {"a": path, "b": path}
    before = name(model, lora_paths=given)
    (folder / "adapter_model.safetensors").write_bytes(b"heavy")
    assert before != name(model, lora_paths=given)


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_a_model_of_a_hub_needs_a_commit(revision: str | None) -> None:
    with pytest.raises(IdentityError, match=f"revision {revision or 'main'} may be another one"):
        name("who/what", revision=revision)
    assert name("who/what", revision="a" * 40) != name("who/what", revision="b" * 40)


def test_an_argument_that_nobody_knows_is_told() -> None:
    class Later(Arguments):
        new_rope: dict[str, Any]

    told = describe_arguments(Later(new_rope={"base": (1, 2)}, odd=SimpleNamespace()))
    assert told["new_rope"] == {"base": [1, 2]}
    assert not told.keys() & (OF_ONE_START | {"_resolved", "odd"})


class RawArguments(Arguments):
    """Arguments as a user gave them; the engine has decided the rest."""

    def resolved_dict(self) -> dict[str, object]:
        return {**vars(self), "model_path": "m", "attention_backend": self.attention_backend or "chosen", "new": 1}


def test_what_the_engine_has_decided_is_told_and_not_what_was_given() -> None:
    told = describe_arguments(resolve_arguments(RawArguments(attention_backend=None, port=7)))
    assert told == describe_arguments(resolve_arguments(RawArguments(attention_backend="chosen", port=8)))
    assert (told["attention_backend"], told["new"], told["dtype"]) == ("chosen", 1, "bfloat16")
    assert not {"port", "_resolved", "lora_paths"} & set(told)
    assert resolve_arguments(arguments := Arguments()) is arguments


def test_adapters_count_in_each_form_alike(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    path = str(adapter)
    forms: list[Any] = [
        [f"one={path}"],
        {"one": path},
        {"one": {"lora_id": "1", "lora_name": "one", "lora_path": path}},
        [{"lora_id": "2", "lora_name": "one", "lora_path": path}],
        [SimpleNamespace(lora_id="3", lora_name="one", lora_path=path)],
    ]
    assert len({name(model, lora_paths=form) for form in forms}) == 1
    assert name(model, lora_paths=forms[0]) != name(model)
