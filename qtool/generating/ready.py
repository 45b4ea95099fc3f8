"""A model made ready to run token by token: matrices as they are stored, or in float32 where the
memory of the machine has room for them.

The model's code is transformers' own. Hidden states are float32; on a device what packed matrices
are multiplied with is float16. Embeddings are float32.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qtool.checkpoints.names import Binding
from qtool.checkpoints.structure import OTHER_TOWERS
from qtool.cuda.device import Device
from qtool.errors import UnsupportedError, UsageError
from qtool.generating.packed_matmul import InFloat32, Key, Matmuls, Matrix, key, matrix
from qtool.memory import memory
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations
from qtool.quality.reading import OnDevice, reading_onto
from qtool.streaming.joined_rows import Joined, RowsOf
from qtool.streaming.meta_model import tensors_of
from qtool.streaming.reading import OnHost
from qtool.streaming.skeleton import Skeleton, move, read_parameter
from qtool.streaming.weights import Weights


@dataclass(frozen=True)
class Ready:
    """A model, loaded. Steps are made within `matmuls`."""

    skeleton: Skeleton
    matmuls: Matmuls
    matrices: Mapping[Key, Sequence[Matrix]]
    on_cpu: InFloat32
    place: Any  # of what it is given

    def step(self, given: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits [texts, vocabulary] of the last of `given` [texts, tokens], float32, and keys and
        values so far. UnsupportedError where transformers cannot run it with a cache."""
        model = self.skeleton.model
        name = cache_name(model.forward)
        try:
            out = model(input_ids=given.to(self.place), use_cache=True, **{name: cache})
            return out.logits[:, -1].float(), getattr(out, name)
        # What a model's own code raises when it is run in a way it was not made for.
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
                ValueError) as error:  # fmt: skip
            out_of_room = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
            if self.matmuls.failed or out_of_room:
                raise
            said = " ".join(str(error).split())[:200]
            raise UnsupportedError(
                f"{type(model).__name__} cannot be run token by token ({type(error).__name__}: "
                f"{said}); `qtool eval` measures it without a cache"
            ) from error


def cache_name(forward: Callable[..., object]) -> str:
    """What a model's forward and what it returns call keys and values: by another name from
    transformers 5.24 on."""
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


def rows_of(skeleton: Skeleton) -> int | None:
    """Of the embedding, as far as the class says it."""
    found = getattr(skeleton.model.get_input_embeddings(), "num_embeddings", None)
    return found if isinstance(found, int) else None


def check_positions(skeleton: Skeleton, tokens: int, said: str, where: Path) -> None:
    """UsageError for more tokens than the model has positions."""
    config = skeleton.model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and tokens > most:
        raise UsageError(f"{said} more than the {most} positions of {where}; give fewer")


def ready(
    skeleton: Skeleton,
    weights: Weights,
    device: Device | None,
    progress: Progress,
    cache_bytes: int = 0,
) -> Ready:
    """The model of an opened skeleton, filled. cache_bytes: that keys and values are going to take,
    which matrices are not kept in."""
    with progress.stage("load"):
        reading = reading_onto(device, weights)
        on_cpu = InFloat32(weights, 0)
        matrices = _load(skeleton, reading, on_cpu)
        on_cpu.room = max(0, _room() - cache_bytes)
    rounded = activations(weights, "plain").fitting(skeleton)
    matmuls = Matmuls(matrices, skeleton.online, rounded)
    for number, block in enumerate(skeleton.blocks):
        block.register_forward_pre_hook(_at(matmuls, number))
    return Ready(skeleton, matmuls, matrices, on_cpu, reading.place)


def ends(skeleton: Skeleton, folder: Path) -> set[int]:
    """Tokens that end a text."""
    said = [getattr(skeleton.model.config, "eos_token_id", None)]
    beside = folder / "generation_config.json"
    if beside.is_file():
        with suppress(ValueError, AttributeError):  # config.json says it, too
            said.append(json.loads(beside.read_text(encoding="utf-8")).get("eos_token_id"))
    flat = [i for one in said for i in (one if isinstance(one, list) else [one])]
    return {i for i in flat if isinstance(i, int)}


def _at(matmuls: Matmuls, number: int) -> Any:
    def note(*_: Any) -> None:
        matmuls.block = number

    return note


def _room() -> int:
    """Bytes of float32 matrices to keep: half of the memory that is available now."""
    _, available = memory()
    return 0 if available is None else available // 2


def _load(
    skeleton: Skeleton, reading: OnHost | OnDevice, on_cpu: InFloat32
) -> dict[Key, list[Matrix]]:
    """Fill the model but for the matrices of linear layers and experts, which are given back by
    their places."""
    multiplied = on_cpu if isinstance(reading, OnHost) else reading
    matrices: dict[Key, list[Matrix]] = {}
    for owner, attribute, name in tensors_of(skeleton.model, ""):
        pieces = skeleton.pieces(name)
        if pieces is None:
            if attribute in owner._parameters and not OTHER_TOWERS.search(name):
                raise skeleton.lacks(name)
            continue
        parameter = getattr(owner, attribute)
        linear = isinstance(owner, nn.Linear | Joined) and attribute == "weight"
        found = _slices(parameter, pieces) if linear or parameter.ndim == 3 else None
        if found is None:
            read_parameter(owner, attribute, pieces, reading)
            continue
        for place, names in found.items():
            matrices[place] = [matrix(multiplied, one) for one in names]
    whole = dict(matrices)
    for module in skeleton.model.modules():
        if isinstance(module, RowsOf):
            (one,) = whole[key(module.joined.weight)]
            matrices[key(module.weight)] = [replace(one, rows=module.rows)]
    move(skeleton.model, reading.place)
    return matrices


def _slices(parameter: torch.Tensor, pieces: Sequence[Binding]) -> dict[Key, list[str]] | None:
    """The matrices [out, in] that a parameter is, or that it is a stack of, and the tensors that
    each is made of, one above the other; None where it is anything else."""
    if not parameter.is_meta:
        return None  # a tied one, which is filled already
    found: dict[Key, list[str]] = {}
    views = {piece.checkpoint_name: piece.view(parameter) for piece in pieces}
    for whole in parameter if parameter.ndim == 3 else (parameter,):
        first, end = whole.storage_offset(), whole.storage_offset() + whole.numel()
        inside = sorted(
            (view.storage_offset(), name)
            for name, view in views.items()
            if first <= view.storage_offset() < end
        )
        at = first
        for offset, name in inside:
            view = views[name]
            rows = view.ndim == 2 and view.shape[1] == whole.shape[1] and view.is_contiguous()
            if not rows or offset != at:
                return None
            at += view.numel()
        if at != end:
            return None
        found[key(whole)] = [name for _, name in inside]
    return found
