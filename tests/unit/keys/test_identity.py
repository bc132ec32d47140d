"""P1: two engines share blocks only if everything that shapes the bytes is equal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.errors import IdentityError
from kvoffload.keys.identity import (
    FORMAT_VERSION,
    Identity,
    LayerDtype,
    ParallelShape,
    compare_identities,
    describe_parts,
)


def make_identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "engine": "vllm",
        "model": "acme/llama",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "model_config": {"rope_theta": 10000.0, "rope_scaling": None, "num_hidden_layers": 2},
        "model_dtype": "bfloat16",
        "layers": (LayerDtype(layer="layers.0", dtype="bfloat16"), LayerDtype(layer="layers.1", dtype="bfloat16")),
        "geometry": {"layout": "LBHNC", "groups": [{"page_bytes": [4096, 4096], "block_size": 16}]},
        "parallel": ParallelShape(tensor=2),
        "hash_algorithm": "sha256",
        "hash_seed": "vllm-none-hash",
    }
    return Identity(**(values | changes))


CHANGES: dict[str, dict[str, Any]] = {
    "engine": {"engine": "mini"},
    "model": {"model": "acme/llama-chat"},
    "revision": {"revision": "f" * 40},
    "rope scaling": {"model_config": {"rope_theta": 10000.0, "rope_scaling": {"factor": 4.0}, "num_hidden_layers": 2}},
    "a number's type": {"model_config": {"rope_theta": 10000, "rope_scaling": None, "num_hidden_layers": 2}},
    "model dtype": {"model_dtype": "float16"},
    "KV dtype of one layer": {
        "layers": (LayerDtype(layer="layers.0", dtype="fp8_e4m3"), LayerDtype(layer="layers.1", dtype="bfloat16"))
    },
    "quantisation of one layer": {
        "layers": (
            LayerDtype(layer="layers.0", dtype="bfloat16"),
            LayerDtype(layer="layers.1", dtype="bfloat16", quantisation="int8_per_token_head"),
        )
    },
    "kernels of one layer": {
        "layers": (
            LayerDtype(layer="layers.0", dtype="bfloat16"),
            LayerDtype(layer="layers.1", dtype="bfloat16", writer="CPU_ATTN amx"),
        )
    },
    "scales of one layer": {
        "layers": (
            LayerDtype(layer="layers.0", dtype="bfloat16"),
            LayerDtype(layer="layers.1", dtype="bfloat16", scales=(1.0, 0.5)),
        )
    },
    "page bytes": {"geometry": {"layout": "LBHNC", "groups": [{"page_bytes": [4096, 8192], "block_size": 16}]}},
    "block size": {"geometry": {"layout": "LBHNC", "groups": [{"page_bytes": [4096, 4096], "block_size": 32}]}},
    "layout": {"geometry": {"layout": "BLHNC", "groups": [{"page_bytes": [4096, 4096], "block_size": 16}]}},
    "parallel shape": {"parallel": ParallelShape(tensor=1)},
    "pipeline": {"parallel": ParallelShape(tensor=2, pipeline=2)},
    "replicas": {"parallel": ParallelShape(tensor=2, kv_replicas=2)},
    "hash algorithm": {"hash_algorithm": "sha256_cbor"},
    "hash seed": {"hash_seed": "other"},
    "salt": {"salt": "tenant a"},
    "format version": {"format_version": FORMAT_VERSION + 1},
}


@pytest.mark.parametrize("changed", CHANGES)
def test_every_field_of_p1_changes_the_fingerprint(changed: str) -> None:
    assert make_identity(**CHANGES[changed]).fingerprint() != make_identity().fingerprint()


def test_different_changes_have_different_fingerprints() -> None:
    prints = {make_identity(**change).fingerprint() for change in CHANGES.values()}
    assert len(prints) == len(CHANGES)


def test_the_fingerprint_is_golden() -> None:
    """Changing this value orphans every stored cache: raise FORMAT_VERSION and say so in the change log."""
    assert make_identity().fingerprint().hex() == "b58783da66e98bd6a0c6119f047c982a1477e43905ae0c1e4406e87c064b127a"


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    script = "from tests.unit.keys.test_identity import make_identity; print(make_identity().fingerprint().hex())"
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert run.stdout.strip() == make_identity().fingerprint().hex()


def test_an_equal_identity_built_in_another_order_is_equal() -> None:
    config = {"num_hidden_layers": 2, "rope_scaling": None, "rope_theta": 10000.0}
    assert make_identity(model_config=config).fingerprint() == make_identity().fingerprint()


def test_the_difference_is_named_with_both_values() -> None:
    other = make_identity(parallel=ParallelShape(tensor=4), **CHANGES["KV dtype of one layer"])
    differences = compare_identities(make_identity().describe(), other.describe())
    assert [difference.field for difference in differences] == ["layers.layers.0.dtype", "parallel.tensor"]
    assert str(differences[1]) == "parallel.tensor: 2 here, 4 there"
    assert compare_identities(other.describe(), other.describe()) == ()


def test_an_absent_field_is_a_difference() -> None:
    ours, theirs = make_identity().describe(), make_identity().describe()
    del theirs["salt"]
    assert [difference.field for difference in compare_identities(ours, theirs)] == ["salt"]


def test_seed_and_salt_do_not_leave_the_process_in_clear() -> None:
    described = repr(make_identity(salt="tenant-secret", hash_seed="seed-secret").describe())
    assert "tenant-secret" not in described
    assert "seed-secret" not in described


def test_what_cannot_be_said_is_refused() -> None:
    for name in ("engine", "model", "revision", "model_dtype", "hash_algorithm"):
        with pytest.raises(IdentityError, match=name):
            make_identity(**{name: ""})
    with pytest.raises(IdentityError, match="no layer"):
        make_identity(layers=())
    with pytest.raises(IdentityError, match="twice"):
        make_identity(layers=(LayerDtype(layer="a", dtype="x"), LayerDtype(layer="a", dtype="y")))
    with pytest.raises(IdentityError, match="tensor = 0"):
        ParallelShape(tensor=0)
    with pytest.raises(IdentityError, match="set"):
        replace(make_identity(), model_config={"bad": {1}}).fingerprint()  # type: ignore[dict-item]


def test_what_users_set_of_an_identity_is_told_in_words_beside_its_digests() -> None:
    layer = {"dtype": "fp8_e4m3", "quantisation": "none", "writer": "", "scales": ()}
    description = {
        "layers": {"layers.0": layer, "layers.1": {**layer, "dtype": "bfloat16", "quantisation": "int8"}},
        "geometry": {"layout": "NHD", "groups": []},
        "parallel": {"tensor": 2, "pipeline": 1},
    }
    told = describe_parts(description)
    assert (told["kv_dtype"], told["layout"], told["parallel_shape"]) == (
        "bfloat16 (int8), fp8_e4m3",
        "NHD",
        "tensor 2",
    )
    assert len(told["layers"]) == 64
    assert describe_parts(told) == told
