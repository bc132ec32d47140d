"""Serves one prompt cold, then again from saved blocks after the KV memory was overwritten, and compares every bit.

Exit code 0: equal (with --negative-control: every damage was noticed). 1: not. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvoffload.errors import GeometryError
from mini_engine.engine import Engine, Request
from mini_engine.kv_cache import LAYOUTS, CacheConfig
from mini_engine.model import LAYER_SETS, ModelConfig
from mini_engine.offload import BlockStore


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse_arguments() -> tuple[Parser, argparse.Namespace]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=LAYER_SETS, default="hybrid")
    parser.add_argument("--quant", choices=("none", "int8_per_token_head"), default="none")
    parser.add_argument("--layout", choices=LAYOUTS, default=CacheConfig.layout)
    parser.add_argument("--overlay", action="store_true", help="groups share memory instead of lying beside each other")
    parser.add_argument("--blocks", type=int, default=64, help="of each group")
    parser.add_argument("--kernel-split", type=int, default=1, help="kernel blocks per block")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2], help="in turn: 2 4 gives two page sizes")
    parser.add_argument("--prompt-tokens", type=int, help="default: what fits, at most five blocks and a half")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--negative-control", action="store_true", help="zero restored blocks, group by group")
    return parser, parser.parse_args()


def show(label: str, request: Request) -> Request:
    logprobs = " ".join(f"{float(row.max()):.6f}" for row in request.logprobs)
    print(f"{label:<22} reused {request.reused} tokens; tokens {request.generated}; logprobs {logprobs}")
    return request


def is_equal(one: Request, other: Request) -> bool:
    return one.generated == other.generated and torch.equal(torch.stack(one.logprobs), torch.stack(other.logprobs))


def main() -> int:
    parser, options = parse_arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    store = BlockStore()
    try:
        model = ModelConfig(layers=LAYER_SETS[options.layers], kv_heads=tuple(options.kv_heads))
        settings = {name: getattr(options, name) for name in ("blocks", "layout", "quant", "kernel_split")}
        cache = CacheConfig(is_overlaid=options.overlay, **settings)
        engine = Engine(model, cache, torch.device(options.device), store)
        full_blocks = min(cache.blocks - 1, 5)
        length = full_blocks * cache.block_tokens + 4 if options.prompt_tokens is None else options.prompt_tokens
        if length <= cache.block_tokens:
            parser.error(f"--prompt-tokens: {cache.block_tokens + 1} or more, so that there is a full block to restore")
        prompt = [(17 * i + 5) % model.vocabulary for i in range(length)]
        cold = engine.run(prompt, max_tokens=4)
    except (ValueError, GeometryError) as error:
        parser.error(str(error))
    print(store.registration.report)
    show("cold", cold)
    engine.scrub()
    restored = show("restored", engine.run(prompt, max_tokens=4))
    print(f"{restored.reused} of {length} prompt tokens restored from {restored.restored_blocks} blocks")
    print(f"tokens and logprobs equal, every bit: {'yes' if is_equal(cold, restored) else 'NO'}")
    if not options.negative_control:
        return 0 if is_equal(cold, restored) else 1
    intact, unnoticed = store.records, []
    for index, group in enumerate(engine.cache.groups):
        store.records = {key: record * (key.group != index) for key, record in intact.items()}
        engine.scrub()
        if is_equal(cold, show(f"{group.name} zeroed", engine.run(prompt, max_tokens=4))):
            unnoticed.append(group.name)
    print(f"damage noticed in every group: {'NO, not in ' + ', '.join(unnoticed) if unnoticed else 'yes'}")
    return 1 if unnoticed or not is_equal(cold, restored) else 0


if __name__ == "__main__":
    sys.exit(main())
