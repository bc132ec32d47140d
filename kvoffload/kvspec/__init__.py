"""kvspec: what an engine's KV cache is, byte for byte, from its configuration.

It must not touch an engine, guess from a tensor's shape, or move a block.
"""

from kvoffload.kvspec.blocks import TensorFacts, check_num_blocks, check_storage, check_tensor, read_facts
from kvoffload.kvspec.completeness import AllocationReport, CompletenessReport
from kvoffload.kvspec.dtype import (
    DtypeSource,
    Quantisation,
    ResolvedDtype,
    find_scheme,
    resolve_kv_dtype,
)
from kvoffload.kvspec.geometry import KVGeometry, ScaleView
from kvoffload.kvspec.group import GroupSpec
from kvoffload.kvspec.layout import (
    LAYOUTS,
    Layout,
    find_layout,
    resolve_block_dim,
    restride_block_major,
    tensor_dims,
)
from kvoffload.kvspec.page_map import BlockRun, GroupPages, PageMap, RecordPart, build_page_map
from kvoffload.kvspec.placement import Allocation, Dim, Placement, Run, place_dims, place_strided
from kvoffload.kvspec.proof import prove_complete
from kvoffload.kvspec.ranges import Exclusion, Padding
from kvoffload.kvspec.registration import Registration, check_alignment
from kvoffload.kvspec.scales import ScaleDecision, decide_scales
from kvoffload.kvspec.self_test import run_self_test
from kvoffload.kvspec.spec import (
    LayerKind,
    LayerSpec,
    ScalePlacement,
    StateSpec,
    attention_layer,
    mla_layer,
    opaque_layer,
    recurrent_layer,
)
from kvoffload.kvspec.units import MAX_UNITS, HeadUnits, UnitPages, cut_placement
from kvoffload.types import ReuseRule

__all__ = [
    "LAYOUTS",
    "MAX_UNITS",
    "Allocation",
    "AllocationReport",
    "BlockRun",
    "CompletenessReport",
    "Dim",
    "DtypeSource",
    "Exclusion",
    "GroupPages",
    "GroupSpec",
    "HeadUnits",
    "KVGeometry",
    "LayerKind",
    "LayerSpec",
    "Layout",
    "Padding",
    "PageMap",
    "Placement",
    "Quantisation",
    "RecordPart",
    "Registration",
    "ResolvedDtype",
    "ReuseRule",
    "Run",
    "ScaleDecision",
    "ScalePlacement",
    "ScaleView",
    "StateSpec",
    "TensorFacts",
    "UnitPages",
    "attention_layer",
    "build_page_map",
    "check_alignment",
    "check_num_blocks",
    "check_storage",
    "check_tensor",
    "cut_placement",
    "decide_scales",
    "find_layout",
    "find_scheme",
    "mla_layer",
    "opaque_layer",
    "place_dims",
    "place_strided",
    "prove_complete",
    "read_facts",
    "recurrent_layer",
    "resolve_block_dim",
    "resolve_kv_dtype",
    "restride_block_major",
    "run_self_test",
    "tensor_dims",
]
