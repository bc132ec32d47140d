"""Stands in for the kernels of gated delta nets on processors: token by token, from the recurrence's definition.

Written for tests: slow, and with the same sums for a sequence that is computed in one piece or in two.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize, silu, softplus


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """`x` is (channels, tokens of all sequences); a state is a sequence's last inputs."""
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for at, slot in enumerate(cache_indices.tolist()):
        first, end = bounds[at], bounds[at + 1]
        former = conv_states[slot] if bool(has_initial_state[at]) else torch.zeros_like(conv_states[slot])
        out[:, first:end] = _convolve(torch.cat([former, x[:, first:end]], dim=1), weight, bias, activation)
        conv_states[slot] = torch.cat([former, x[:, first:end]], dim=1)[:, -former.shape[1] :]
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """`x` is (sequences, channels): one token of each."""
    out = torch.empty_like(x)
    for at, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        inputs = torch.cat([conv_states[slot], x[at][:, None]], dim=1)
        out[at] = _convolve(inputs, weight, bias, activation)[:, 0]
        conv_states[slot] = inputs[:, 1:]
    return out


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """(channels, width - 1 + tokens) to (channels, tokens)."""
    windows = inputs.float().unfold(1, weight.shape[1], 1)
    out = (windows * weight.float()[:, None, :]).sum(-1)
    if bias is not None:
        out = out + bias.float()[:, None]
    return (silu(out) if activation in ("silu", "swish") else out).to(inputs.dtype)


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None, None]:
    """Whole sequences, one after the other in the second dimension; their states are left where they were."""
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    gates, betas = g.reshape(-1, v.shape[2]), beta.reshape(-1, v.shape[2])
    for at, slot in enumerate(initial_state_indices.tolist()):
        for token in range(bounds[at], bounds[at + 1]):
            out[0, token] = _step(
                initial_state, slot, q[0, token], k[0, token], v[0, token], gates[token], betas[token]
            )
    return out, None, None


def _gate(
    log_rates: torch.Tensor, a: torch.Tensor, b: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    decay = -log_rates.float().exp() * softplus(a.float() + shift.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def _update(
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
) -> torch.Tensor:
    """One token of each sequence."""
    decay, rates = _gate(A_log, a.reshape(-1, v.shape[2]), b.reshape(-1, v.shape[2]), dt_bias)
    out = torch.empty_like(v)
    for token, slot in enumerate(initial_state_indices.tolist()):
        if slot >= 0:
            out[0, token] = _step(
                initial_state_source, slot, q[0, token], k[0, token], v[0, token], decay[0, token], rates[0, token]
            )
    return out


def _step(
    states: torch.Tensor,
    slot: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
) -> torch.Tensor:
    """A state is (heads of values, size of a value, size of a key)."""
    repeats = v.shape[0] // k.shape[0]
    query = normalize(q.float(), dim=-1, eps=1e-6).repeat_interleave(repeats, 0) * q.shape[-1] ** -0.5
    key = normalize(k.float(), dim=-1, eps=1e-6).repeat_interleave(repeats, 0)
    state = states[slot].float() * decay.float().exp()[:, None, None]
    seen = (state * key[:, None, :]).sum(-1)
    state = state + ((v.float() - seen) * rate.float()[:, None])[:, :, None] * key[:, None, :]
    states[slot] = state.to(states.dtype)
    return (state * query[:, None, :]).sum(-1).to(v.dtype)


_OPS = torch.library.Library("sgl_kernel", "FRAGMENT")
_OPS.define("fused_gdn_gating_cpu(Tensor rates, Tensor a, Tensor b, Tensor shift) -> (Tensor, Tensor)")
_OPS.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0, bool is_kda=False) -> Tensor"
)
_OPS.impl("fused_gdn_gating_cpu", _gate, "CPU")
_OPS.impl("fused_sigmoid_gating_delta_rule_update_cpu", _update, "CPU")
