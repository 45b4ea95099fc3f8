"""Greedy decoding of a few tokens, with keys and values kept, from matrices as they are stored, or
in float32 where the memory of the machine has room for them.

The model's code is transformers' own. Hidden states are float32; on a device what packed matrices
are multiplied with is float16. Embeddings are float32.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qtool.calibrating.device import Device
from qtool.calibrating.meta_model import tensors_of
from qtool.calibrating.reading import OnHost
from qtool.calibrating.skeleton import Skeleton, move, read_parameter
from qtool.calibrating.tokenizing import text_after, tokenize
from qtool.cuda.reading import OnDevice, reading_onto
from qtool.errors import SourceError, UnsupportedError, UsageError
from qtool.generating.products import InFloat32, Key, Matrix, Products, key, matrix
from qtool.memory import memory
from qtool.names import Binding
from qtool.quality.engine_inputs import activations
from qtool.quality.weights import open_weights, say_damaged_record
from qtool.runs.progress import Progress


@dataclass(frozen=True)
class Generated:
    """What came out, ready for --json."""

    artifact: str
    device: str
    prompt: str
    text: str  # what follows the prompt
    prompt_tokens: int
    tokens: tuple[int, ...]
    ended: bool  # by the model's own end of text
    seconds_prompt: float
    seconds: float  # of the tokens after the first
    matrices: int
    fused: int  # of them, those that single vectors are multiplied with as packed words
    not_kept: int  # on the CPU, those that were dequantized for each product, for lack of memory

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was one token only."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else None

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool generate`."""
        rate = {"tokens_per_second": self.tokens_per_second}
        return {**vars(self), "tokens": list(self.tokens), **rate}


def generate(
    path: Path, prompt: str, tokens: int, device: Device | None, progress: Progress
) -> Generated:
    """Up to `tokens` tokens that follow the prompt, each the likeliest one.

    SourceError where what the model says is not finite; UnsupportedError where transformers cannot
    run it with a cache.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: is not UTF-8; give text that is") from None
    with open_weights(path) as weights:
        say_damaged_record(path, weights, progress)
        ids = tokenize(prompt, weights.folder, special=True).tolist()
        if not ids:
            raise SourceError("--prompt: it has no tokens; give a word or more")
        skeleton = Skeleton.open(weights)
        rows = getattr(skeleton.model.get_input_embeddings(), "num_embeddings", None)
        if isinstance(rows, int) and max(ids) >= rows:
            raise SourceError(
                f"{path}: its tokenizer gives the id {max(ids)}, and the model has a vocabulary of "
                f"{rows}; put the model's own tokenizer beside the weights"
            )
        most = getattr(skeleton.model.config, "max_position_embeddings", None)
        if isinstance(most, int) and len(ids) + tokens > most:
            raise UsageError(
                f"{len(ids)} tokens of prompt and --tokens {tokens} are more than the {most} "
                f"positions of {path}; give fewer"
            )
        with progress.stage("load"):
            reading = reading_onto(device, weights)
            on_cpu = InFloat32(weights, 0)
            matrices = _load(skeleton, reading, on_cpu)
            on_cpu.room = _room()
        rounded = activations(weights, "plain").fitting(skeleton)
        products = Products(matrices, skeleton.online, rounded)
        for number, block in enumerate(skeleton.blocks):
            block.register_forward_pre_hook(_at(products, number))
        ends = _ends(skeleton, weights.folder)
        found: list[int] = []
        times = [time.monotonic()]
        cache: Any = None
        with progress.stage("generate"), torch.no_grad(), products:
            for _ in progress.blocks(tokens, "token"):
                given = torch.tensor([found[-1:] or ids], device=reading.place)
                logits, cache = _step(skeleton.model, given, cache, products)
                if not bool(torch.isfinite(logits).all()):
                    raise SourceError(
                        f"{path}: what it says after token {len(ids) + len(found)} is not a finite "
                        "number; it is broken, or overflows in float16"
                    )
                found.append(int(logits.argmax()))
                times.append(time.monotonic())
                if found[-1] in ends:
                    break
        return Generated(
            str(path),
            "cpu" if device is None else device.name,
            prompt,
            text_after(ids, found, weights.folder),
            len(ids),
            tuple(found),
            found[-1] in ends,
            times[1] - times[0],
            times[-1] - times[1],
            sum(map(len, matrices.values())),
            sum(one.fused for parts in matrices.values() for one in parts),
            len(on_cpu.left_out),
        )


def _step(model: Any, given: torch.Tensor, cache: Any, products: Products) -> Any:
    """Logits [vocabulary] of the last position, and keys and values so far."""
    try:
        out = model(input_ids=given, past_key_values=cache, use_cache=True)
        return out.logits[0, -1].float(), out.past_key_values
    # What a model's own code raises when it is run in a way it was not made for.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as error:  # fmt: skip
        if products.failed or isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        said = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"{type(model).__name__} cannot be run token by token ({type(error).__name__}: "
            f"{said}); `qtool eval` measures it without a cache"
        ) from error


def _at(products: Products, number: int) -> Any:
    def note(*_: Any) -> None:
        products.block = number

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
            if attribute in owner._parameters:
                raise skeleton.lacks(name)
            continue
        parameter = getattr(owner, attribute)
        linear = isinstance(owner, nn.Linear) and attribute == "weight"
        found = _slices(parameter, pieces) if linear or parameter.ndim == 3 else None
        if found is None:
            read_parameter(owner, attribute, pieces, reading)
            continue
        for place, names in found.items():
            matrices[place] = [matrix(multiplied, one) for one in names]
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


def _ends(skeleton: Skeleton, folder: Path) -> set[int]:
    """Tokens that end a text."""
    said = [getattr(skeleton.model.config, "eos_token_id", None)]
    beside = folder / "generation_config.json"
    if beside.is_file():
        with suppress(ValueError, AttributeError):  # config.json says it, too
            said.append(json.loads(beside.read_text(encoding="utf-8")).get("eos_token_id"))
    flat = [i for one in said for i in (one if isinstance(one, list) else [one])]
    return {i for i in flat if isinstance(i, int)}
