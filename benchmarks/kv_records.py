"""Writes files of records as the pool stores them: keys and values of a real model that reads real texts, and more.

The model is SmolLM2-135M-Instruct as `tests/vllm/smollm2.py` builds it; a record is a block of all its layers in the
layout LBHNC. The texts are files of this tree. Beside them: the same in fp8, keys and values of random weights,
recurrent states of a linear attention over the same keys and values, scales, and random bytes.

Run: python -m benchmarks.kv_records FOLDER [MODEL_FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TOKENS = 64
PROMPT_TOKENS = 1024
SEED = 36
TEXTS = {
    "documentation": ("docs/disk.md", "docs/deploy.md"),
    "python": ("kvoffload/config/settings.py",),
    "cpp": ("native/src/disk/device.cpp", "native/src/disk/segment_writer.cpp"),
    "tables": ("docs/models.md",),
    "results": ("benchmarks/results/nvidia-h200.json",),
    "licence": ("LICENSE",),
}


def read_text(names: tuple[str, ...]) -> str:
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)


def compute_kv(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns keys and values as [layer, key or value, head, token, channel]."""
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


def cut_records(kv: torch.Tensor) -> Iterator[torch.Tensor]:
    """One tensor for each whole block: [layer, head, token, keys and values of a token]."""
    rows = torch.cat((kv[:, 0], kv[:, 1]), dim=-1)
    for begin in range(0, rows.shape[2] - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        yield rows[:, :, begin : begin + BLOCK_TOKENS].contiguous()


def make_states(kv: torch.Tensor) -> torch.Tensor:
    """The sums of key times value of each head, decayed as recurrent layers do, in float32."""
    state = torch.zeros(kv.shape[0], kv.shape[2], kv.shape[4], kv.shape[4])
    for token in range(kv.shape[3]):
        key, value = kv[:, 0, :, token].float(), kv[:, 1, :, token].float()
        state = 0.97 * state + key.unsqueeze(-1) * value.unsqueeze(-2)
    return state


def make_scales(kv: torch.Tensor) -> torch.Tensor:
    """One scale for each token and head, as caches that are quantised token by token keep them."""
    return kv.float().abs().amax(dim=-1) / 448.0


def write_records(path: Path, records: list[torch.Tensor]) -> dict[str, object]:
    with path.open("wb") as file:
        for record in records:
            file.write(record.contiguous().view(torch.uint8).numpy().tobytes())
    return {"file": path.name, "records": len(records), "record_bytes": records[0].numel() * records[0].element_size()}


def write_all(folder: Path, source: Path | None) -> dict[str, dict[str, object]]:
    """Returns what was written, by name, as records.json has it. The model is that of `source`, or is built."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        from tests.vllm.smollm2 import build

        source = folder / "model"
        if not source.is_dir():
            build(source)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    listing: dict[str, dict[str, object]] = {}
    states, scales = [], []
    for name, files in TEXTS.items():
        tokens = tokenizer(read_text(files), return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
        kv = compute_kv(model, tokens)
        records = list(cut_records(kv))
        listing[f"{name}_bf16"] = write_records(folder / f"{name}_bf16.bin", records)
        listing[f"{name}_fp16"] = write_records(folder / f"{name}_fp16.bin", [one.half() for one in records])
        fp8 = [one.float().clamp(-448, 448).to(torch.float8_e4m3fn) for one in records]
        listing[f"{name}_fp8"] = write_records(folder / f"{name}_fp8.bin", fp8)
        states.append(make_states(kv))
        scales.append(make_scales(kv))
    tokens = tokenizer(read_text(TEXTS["documentation"]), return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
    random_model = LlamaForCausalLM(model.config).to(torch.bfloat16)
    random_records = list(cut_records(compute_kv(random_model, tokens)))
    listing["random_weights_bf16"] = write_records(folder / "random_weights_bf16.bin", random_records)
    listing["states_fp32"] = write_records(folder / "states_fp32.bin", states)
    listing["scales_fp32"] = write_records(folder / "scales_fp32.bin", scales)
    noise = [torch.randint(0, 256, (random_records[0].numel() * 2,), dtype=torch.uint8) for _ in range(8)]
    listing["random_bytes"] = write_records(folder / "random_bytes.bin", noise)
    (folder / "records.json").write_text(json.dumps(listing, indent=1) + "\n", encoding="utf-8")
    return listing


def parse_folders(about: str | None, *others: str) -> argparse.Namespace:
    """Parses folders of a program's command line: its own, then `records`, and `model` if it is given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in others:
        parser.add_argument(name, type=Path)
    parser.add_argument("records", type=Path, help="of `python -m benchmarks.kv_records`; made where it has none")
    parser.add_argument("model", type=Path, nargs="?", help="a model's folder; without it the one of a wheel is built")
    return parser.parse_args()


def make_missing(folder: Path, source: Path | None) -> None:
    """Makes the records where the folder has none."""
    if not (folder / "records.json").is_file():
        write_all(folder, source)


def main() -> None:
    given = parse_folders(__doc__)
    print(json.dumps(write_all(given.records, given.model)))


if __name__ == "__main__":
    main()
