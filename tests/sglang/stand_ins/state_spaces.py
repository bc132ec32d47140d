"""Stands in for the kernels of Mamba 2 on processors: token by token, from the recurrence's definition.

Written for tests: slow, and with the same sums for a sequence that is computed in one piece or in two.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any


def correct(module: ModuleType) -> None:
    """SGLang binds its convolutions on accelerators alone, and the others are Triton's."""
    from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu

    def convolve_one(x: Any, states: Any, weight: Any, bias: Any, activation: str, *, conv_state_indices: Any) -> Any:
        return causal_conv1d_update_cpu(x, states, weight, bias, activation, conv_state_indices=conv_state_indices)

    names: dict[str, Any] = {
        "causal_conv1d_fn_triton": causal_conv1d_fn_cpu,
        "causal_conv1d_update_triton": convolve_one,
        "mamba_chunk_scan_combined": scan,
        "selective_state_update": step,
    }
    for name, stand_in in names.items():
        setattr(module, name, stand_in)


def scan(
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    *,
    D: Any,  # noqa: N803
    dt_bias: Any,
    cu_seqlens: Any,
    initial_states: Any,
    out: Any,
    state_dtype: Any,
    **_: object,
) -> tuple[None, Any, None]:
    """Whole sequences, one after the other in the second dimension. Returns the state at the end of each."""
    import torch

    bounds, ends = cu_seqlens.tolist(), []
    for at, (first, end) in enumerate(pairwise(bounds)):
        state = torch.zeros(*x.shape[2:], B.shape[-1]) if initial_states is None else initial_states[at].float()
        for token in range(first, end):
            rate = torch.nn.functional.softplus(dt[0, token].float() + dt_bias.float())[:, None]
            state, out[0, token] = _go_on(state, x[0, token], rate, A[:, None], B[0, token], C[0, token], D[:, None])
        ends.append(state.to(state_dtype))
    return None, torch.stack(ends), None


def step(
    states: Any,
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any,  # noqa: N803
    *,
    dt_bias: Any,
    state_batch_indices: Any,
    out: Any,
    **_: object,
) -> None:
    """One token of each sequence; what belongs to a head is given for each of its channels."""
    import torch

    for at, slot in enumerate(state_batch_indices.tolist()):
        if slot >= 0:
            rate = torch.nn.functional.softplus(dt[at].float() + dt_bias.float())
            state, out[at] = _go_on(states[slot].float(), x[at], rate, A[..., 0], B[at], C[at], D)
            states[slot] = state.to(states.dtype)


def _go_on(
    state: Any,
    x: Any,
    rate: Any,
    A: Any,  # noqa: N803
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any,  # noqa: N803
) -> tuple[Any, Any]:
    """A state is (heads, channels of a head, size of a state)."""
    repeats = x.shape[0] // B.shape[0]
    inputs, outputs = B.float().repeat_interleave(repeats, 0), C.float().repeat_interleave(repeats, 0)
    state = state * (rate * A.float()).exp()[:, :, None] + (rate * x.float())[:, :, None] * inputs[:, None, :]
    return state, ((state * outputs[:, None, :]).sum(-1) + D.float() * x.float()).to(x.dtype)
