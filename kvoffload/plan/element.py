"""How many bytes the numbers of a cache take, by the names that vLLM has for their types."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import ConfigError

_WHOLE = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
_QUANTISED = {
    "fp8": (1.0, 0),
    "fp8_e4m3": (1.0, 0),
    "fp8_e5m2": (1.0, 0),
    "int8_per_token_head": (1.0, 4),
    "fp8_per_token_head": (1.0, 4),
    "int4_per_token_head": (0.5, 4),
}
"""Bytes of a number, and of the scale that comes with the keys, and with the values, of each token and head."""
DTYPES = ("auto", *_WHOLE, *_QUANTISED)


@dataclass(frozen=True)
class Element:
    """`scale_bytes`: bytes in addition to the numbers of one head and token, for keys and values each."""

    name: str
    number_bytes: float
    scale_bytes: int = 0

    def row_bytes(self, numbers: int) -> int:
        """Returns the bytes of one head and token."""
        size = numbers * self.number_bytes
        if size != int(size):
            raise ConfigError(f"{numbers} numbers of {self.name} are no whole bytes", remedy="choose another type")
        return int(size) + self.scale_bytes


def find_element(name: str, *, of_model: str, setting: str) -> Element:
    """`of_model` is what "auto" stands for. ConfigError names `setting`."""
    chosen = of_model if name == "auto" else name
    if chosen in _WHOLE:
        return Element(chosen, _WHOLE[chosen])
    if chosen in _QUANTISED and setting == "kv-dtype":
        return Element(chosen, *_QUANTISED[chosen])
    allowed = DTYPES if setting == "kv-dtype" else ("auto", *_WHOLE)
    raise ConfigError(f"{setting} {chosen!r} is not known", remedy=f"allowed are {', '.join(allowed)}")
