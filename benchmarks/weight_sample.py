"""How long a worker looks at the weights of a model of 70 billion parameters, cut over two devices.

Its limit is a copy of as many bytes as are sampled. Prints one JSON line. Run: python -m benchmarks.weight_sample [cpu]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch

from kvoffload.engines.weight_sample import sample_tensors

LAYERS, WIDTH, INNER, HEADS_WIDTH, VOCABULARY = 80, 8192, 28672, 10240, 128256
"""The sizes of Llama 3 70B."""
RUNS = 5


def make_weights(device: str, ranks: int, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Makes the weights that one rank holds."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).fill_(1)

    for name in ("embed_tokens", "lm_head"):
        yield name, make(VOCABULARY // ranks, WIDTH)
    for layer in range(layers):
        yield f"{layer}.qkv", make(HEADS_WIDTH // ranks, WIDTH)
        yield f"{layer}.o", make(WIDTH, WIDTH // ranks)
        yield f"{layer}.gate_up", make(2 * INNER // ranks, WIDTH)
        yield f"{layer}.down", make(WIDTH, INNER // ranks)
        for norm in ("input", "post"):
            yield f"{layer}.{norm}_norm", make(WIDTH)


def measure(act: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return taken


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    weights = list(make_weights(device, ranks=2, layers=LAYERS if device == "cuda" else 2))
    sample = sample_tensors(weights)
    times = measure(lambda: sample_tensors(weights))
    sampled = torch.zeros(sample.sampled, dtype=torch.bfloat16, device=device)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
                "tensors": len(weights),
                "elements": sample.elements,
                "sampled": sample.sampled,
                "first_s": round(times[0], 4),
                "median_s": round(sorted(times)[RUNS // 2], 4),
                "copy_s": round(sorted(measure(sampled.cpu))[RUNS // 2], 5),
            }
        )
    )


if __name__ == "__main__":
    main()
