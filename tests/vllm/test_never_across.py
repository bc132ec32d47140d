"""P1 on the real engine: no hit across engines, or requests, that would compute other bytes for the same tokens.

One server keeps what all of them save. Every engine computes the same prompt, one after the other, and each must find
nothing of those before it; then each is started again, and must find all of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.kit.children import child
from tests.vllm import connector_probe as probe
from tests.vllm import tiny_models
from tests.vllm.engine import NO_FP8, Engine, EnginePool, lacks_kernels, make_prompt, start_engine
from tests.vllm.tiny_adapters import write_adapter
from tests.vllm.tiny_models import DENSE
from tests.vllm.weights import loaded_with_other_keys

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.vllm

PROMPT = make_prompt(seed=30, length=700)
RESTORABLE = 640
MAX_ASKS = 200
"""How often a prompt is asked for until what it saved is found: an adapter is read meanwhile."""


@dataclass(frozen=True)
class Answer:
    """The answer of a run, and how much of its prompt came from a cache."""

    cached: int
    tokens: list[int]
    logprobs: list[float]

    @property
    def content(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


@dataclass(frozen=True)
class Setting:
    """One engine's setting. Settings of one test differ in the thing that they are named by."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: int = tiny_models.SEED
    kv_scale: float = 1.0
    keys: float = 1.0
    """Factor of keys by weights that are in memory, and in no folder."""


BASE = Setting("base")
FP8 = {"kv_cache_dtype": "fp8"}
ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
SETTINGS = (
    BASE,
    Setting("model dtype", {"dtype": "float32"}),
    Setting("KV dtype", FP8),
    Setting("KV dtype of as many bytes", {"kv_cache_dtype": "fp8_e5m2"}),
    Setting("KV scales", FP8, kv_scale=0.5),
    Setting("rope", {"hf_overrides": {"rope_parameters": ROPE}}),
    Setting("rope scaling", {"hf_overrides": {"rope_parameters": YARN}}),
    Setting("weights", weights=tiny_models.SEED + 1),
    Setting("weights in memory", keys=2.0),
    Setting("hash algorithm", {"prefix_caching_hash_algo": "sha256_cbor"}),
    Setting("hash seed", environment={"PYTHONHASHSEED": "7"}),
    Setting("block size", {"block_size": 64}),
)
ADAPTERS = Setting("adapters", {"enable_lora": True, "max_lora_rank": 8})
SIZES = {"kv_cache_memory_bytes": 300 << 20, "max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": 320}
SAME = (Setting("sizes, and dtypes by name", {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", **SIZES}), ADAPTERS)


@dataclass(frozen=True)
class Shop:
    """A server, and the one folder in which every engine finds its model."""

    socket: Path
    model: Path

    @contextmanager
    def open(self, setting: Setting = BASE) -> Iterator[Engine]:
        """Opens a new engine: what it has cached before, others have."""
        with ExitStack() as stack:
            for name, value in setting.environment.items():
                patch = pytest.MonkeyPatch()
                stack.callback(patch.undo)
                patch.setenv(name, value)
            if setting.kv_scale != 1.0:
                stack.enter_context(_scales(setting.kv_scale))
            if setting.keys != 1.0:
                stack.enter_context(loaded_with_other_keys(setting.keys))
            self._fill(setting.weights)
            transfer = {
                "kv_connector": "KVOffloadConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"server": str(self.socket), **probe.PATIENCE},
            }
            engine = start_engine(DENSE, self.model, kv_transfer_config=transfer, **setting.arguments)
            try:
                yield engine
                probe.drain(engine)
            finally:
                engine.close()

    def _fill(self, seed: int) -> None:
        """The path is part of a folder's name, so that other weights must lie in the same one."""
        built = self.model.with_name(f"weights {seed}")
        if not built.exists():
            with mock.patch.object(tiny_models, "SEED", seed):
                DENSE.build(built)
        self.model.unlink(missing_ok=True)
        self.model.symlink_to(built)


@contextmanager
def _scales(scale: float) -> Iterator[None]:
    """Layers whose keys and values are divided by `scale`, as a calibrated checkpoint would have it."""
    from vllm.model_executor.layers.attention import attention

    set_default = attention.set_default_quant_scales

    def set_calibrated(layer: Any, register_buffer: bool = False) -> None:
        set_default(layer, register_buffer)
        for name in ("_k_scale", "_v_scale"):
            getattr(layer, name).fill_(scale)
            setattr(layer, f"{name}_float", scale)

    with mock.patch.object(attention, "set_default_quant_scales", set_calibrated):
        yield


@pytest.fixture(scope="module")
def shop(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    engines.leave_process()
    folder = tmp_path_factory.mktemp("shop")
    serve = ["-c", "from kvoffload.cli.app import main; main()", "serve", "--adopt-wait", "0"]
    settings = [f"server={folder}/s", "memory=512MiB", "segment_size=64MiB"]
    with child([*serve, *(word for setting in settings for word in ("--set", setting))]) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("kvoffload serves")
        yield Shop(folder / "s", folder / "model")


def ask(engine: Engine, *, salt: str = "", adapter: LoRARequest | None = None) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    prompt: Any = {"prompt_token_ids": PROMPT, **({"cache_salt": salt} if salt else {})}
    (output,) = engine.llm.generate(prompt, sampling, use_tqdm=False, lora_request=adapter)
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    assert completion.logprobs is not None
    logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    return Answer(output.num_cached_tokens or 0, tokens, logprobs)


def ask_until_restored(engine: Engine, **how: Any) -> Answer:
    """Asks until an answer is from our cache alone; the first answers may not be, while an adapter is being read."""
    for _ in range(MAX_ASKS):
        engine.reset_local()
        answer = ask(engine, **how)
        if answer.cached:
            return answer
    raise AssertionError(f"{how}: nothing was restored in {MAX_ASKS} runs")


# ---- engines ----


@pytest.fixture(scope="module")
def first_answers(shop: Shop) -> Mapping[str, tuple[Answer, Answer]]:
    """Returns of each setting's first engine what it answered at first, and then from its own cache."""
    answers = {}
    for setting in SETTINGS:
        if lacks_kernels(setting.arguments):
            continue
        with shop.open(setting) as engine:
            answers[setting.name] = ask(engine), ask(engine)
    return answers


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_engine_finds_nothing_of_engines_that_differ_in_one_thing(
    first_answers: Mapping[str, tuple[Answer, Answer]], setting: Setting
) -> None:
    if lacks_kernels(setting.arguments):
        pytest.skip(NO_FP8)
    cold, local = first_answers[setting.name]
    assert (cold.cached, local.cached) == (0, RESTORABLE)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_equal_engine_finds_everything_and_says_the_same(
    shop: Shop, first_answers: Mapping[str, tuple[Answer, Answer]], setting: Setting
) -> None:
    """Without this the test above would prove nothing: the server has each engine's blocks, and gives them to their
    owner."""
    if lacks_kernels(setting.arguments):
        pytest.skip(NO_FP8)
    _, local = first_answers[setting.name]
    with shop.open(setting) as engine:
        restored = ask(engine)
        assert probe.faults(engine) == {}
    assert restored == local


@pytest.mark.parametrize("setting", SAME, ids=lambda setting: setting.name)
def test_what_does_not_change_bytes_does_not_part_engines(
    shop: Shop, first_answers: Mapping[str, tuple[Answer, Answer]], setting: Setting
) -> None:
    with shop.open(setting) as engine:
        assert ask(engine).cached == RESTORABLE


# ---- requests ----


def test_salts_keep_requests_apart_on_every_engine(shop: Shop) -> None:
    with shop.open() as engine:
        for salt in ("one", "two"):
            assert ask(engine, salt=salt).cached == 0
    with shop.open() as engine:
        assert [ask(engine, salt=salt).cached for salt in ("one", "two", "three")] == [RESTORABLE, RESTORABLE, 0]


def helper(folder: Path, number: int = 1) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="helper", lora_int_id=number, lora_path=str(folder))


def test_an_adapter_that_changed_under_its_name_finds_nothing_of_the_old_one(shop: Shop, tmp_path: Path) -> None:
    """In a new engine, which reads it under the same id as the one before did."""
    answers = []
    for seed in (1, 2):
        folder = write_adapter(tmp_path / "helper", seed=seed)
        with shop.open(ADAPTERS) as engine:
            assert [ask(engine, adapter=helper(folder)).cached for _ in range(2)] == [0, RESTORABLE]
            local = ask(engine, adapter=helper(folder))
            restored = ask_until_restored(engine, adapter=helper(folder))
            assert restored == local
            answers.append(restored.content)
    assert answers[0] != answers[1]
    write_adapter(tmp_path / "helper", seed=1)
    with shop.open(ADAPTERS) as engine:
        again = ask_until_restored(engine, adapter=helper(tmp_path / "helper"))
        assert again.content == answers[0]


def test_an_adapter_that_changed_while_the_engine_runs_spoils_nothing(shop: Shop, tmp_path: Path) -> None:
    """Loaded again under an id of its own, as vLLM's server does after an unload: vLLM's own prefix cache takes the old
    one's blocks for it, and they must not be saved as the new one's."""
    folder = write_adapter(tmp_path / "helper", seed=3)
    with shop.open(ADAPTERS) as engine:
        old = ask_until_restored(engine, adapter=helper(folder, 1))
        write_adapter(folder, seed=4)
        ask(engine, adapter=helper(folder, 2))
        for number in (2, 1, 2):
            engine.reset_local()
            assert ask(engine, adapter=helper(folder, number)).cached == 0
        moved = write_adapter(tmp_path / "helper 2", seed=4)
        new = ask_until_restored(engine, adapter=helper(moved, 3))
        assert new.content != old.content
    with shop.open(ADAPTERS) as engine:
        assert ask_until_restored(engine, adapter=helper(folder)).content == new.content


def test_the_model_itself_and_its_adapters_are_apart(shop: Shop, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / f"helper{seed}", seed=seed) for seed in (5, 6)]
    adapters = [None, *(helper(folder, number) for number, folder in enumerate(folders, start=1))]
    with shop.open(ADAPTERS) as engine:
        restored = [ask_until_restored(engine, adapter=adapter).content for adapter in adapters]
        assert len({tuple(tokens) for tokens, _ in restored}) == len(adapters)
        for adapter, expected in zip(adapters, restored, strict=True):
            engine.reset_local()
            again = ask(engine, adapter=adapter)
            assert (again.cached, again.content) == (RESTORABLE, expected)


# ---- what we rely on the engine for ----


def block_hashes(**arguments: Any) -> list[bytes]:
    """vLLM's own, of a request whose first block holds an image."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier=arguments.pop("image", "a"), mm_position=PlaceholderRange(4, 20)
    )
    request = Request(
        request_id="1",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[image],
        block_hasher=kv_cache_utils.get_request_block_hasher(128, sha256),
        **arguments,
    )
    return [bytes(name) for name in request.block_hashes]


def test_the_engines_hashes_tell_images_salts_and_adapters_apart(tmp_path: Path) -> None:
    """Hashes differ from the first block to the last. An adapter counts by name and path; its contents are checked by
    us."""
    variants: list[dict[str, Any]] = [
        {},
        {"image": "b"},
        # Two digests of images that differ in one of 256 bits.
        {"image": "f0" * 32},
        {"image": "f0" * 31 + "f1"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": helper(tmp_path / "one")},
        {"lora_request": helper(tmp_path / "two")},
    ]
    hashes = [block_hashes(**variant) for variant in variants]
    assert [len(names) for names in hashes] == [len(PROMPT) // 128] * len(variants)
    assert len({name for names in hashes for name in names}) == sum(map(len, hashes))
    assert block_hashes() == hashes[0]
    assert block_hashes(lora_request=helper(tmp_path / "one", 2)) == hashes[6]
