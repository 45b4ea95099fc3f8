"""What engines see of the artifact that a plan will write, before it is written."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.artifacts.cache_scales import attention_of
from qtool.checkpoints.structure import expert_of, text_config
from qtool.errors import UnsupportedError
from qtool.formats import FORMATS
from qtool.planning.fit import format_options
from qtool.planning.plan import Plan
from qtool.runs.sink import EngineRotations, artifact_facts
from qtool.verification.engines.view import EngineView, ends_mlp, view_of_plan

_SMALLEST = 8  # of the rotations of transforms/online.py, which finds them in the forward pass


def planned_view(
    plan: Plan, config: Mapping[str, Any], rotated: EngineRotations | None = None
) -> EngineView:
    """The view. config: the model's; rotated: what engines have to rotate."""
    facts, options = artifact_facts(plan), format_options(plan.recipe)
    quantization: dict[str, Any] = {}
    if facts is not None:
        if rotated is not None:
            facts = replace(facts, rotated_inputs=rotated.inputs, rotated_heads=rotated.heads)
        quantization = FORMATS[plan.format].config(facts, options)
    return view_of_plan(plan.format, options.layout, plan.tensors, config, quantization)


def expected(plan: Plan, config: Mapping[str, Any]) -> EngineRotations | None:
    """What a run will leave to engines to rotate, by names and shapes; None where nothing."""
    recipe = plan.recipe
    if not recipe.rotates or not recipe.rotate.online:
        return None
    inputs, heads = {}, {}
    for tensor in plan.tensors if recipe.rotate.r4 else ():
        if tensor.block is None or len(tensor.shape) != 2 or not ends_mlp(tensor.module):
            continue
        size = tensor.shape[1] & -tensor.shape[1]
        if size >= _SMALLEST and expert_of(tensor.name) is None:
            inputs[tensor.module] = size
    if recipe.rotate.r3:
        width = _head_width(config)
        size = width & -width
        names = [t.name for t in plan.tensors if t.block is not None and len(t.shape) == 2]
        if size >= _SMALLEST:
            try:
                known = attention_of(names, config, False)
            except UnsupportedError:
                known = {}
            heads = {kept.attention: size for kept in known.values()}
    return EngineRotations(inputs, heads) if inputs or heads else None


def _head_width(config: Mapping[str, Any]) -> int:
    text = text_config(config)
    given, hidden, count = (
        text.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads")
    )
    if type(given) is int and given > 0:
        return given
    if type(hidden) is int and type(count) is int and 0 < count <= hidden:
        return hidden // count
    return 0
