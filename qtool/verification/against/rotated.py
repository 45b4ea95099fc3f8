"""The source of a rotated artifact, rotated in the same way, so that weights can be compared.

What was done is told by qtool.json, or a GGUF file's own recipe: kind, seed and which rotations.
Learned ones are not kept, so that weights made with them cannot be compared with any others.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.gguf_models import is_gguf
from qtool.checkpoints.padding import padded
from qtool.errors import QtoolError
from qtool.gguf.source import GgufSource
from qtool.streaming.weights import Weights
from qtool.verification.finding import Finding

if TYPE_CHECKING:
    from qtool.transforms.rotated import Rotated
    from qtool.transforms.rotations import Rotations

CHECK, SCALES = "rotation", "smoothing"
_SEEDS = "an integer from 0 to 4,294,967,295"
_KINDS = ("r1", "r2", "r3", "r4")


def as_rotated(artifact: Artifact, source: Weights) -> tuple[Weights | None, list[Finding]]:
    """What the artifact's weights are to be compared with, None where there is nothing."""
    if artifact.unreadable:
        words = (
            "weights were not compared: qtool.json, which would say whether the model was rotated, "
            f"cannot be read ({artifact.unreadable}); fetch or make the artifact again"
        )
        return None, [Finding("error", CHECK, "qtool.json", words)]
    record = (artifact.provenance or {}).get("rotation")
    if not isinstance(record, Mapping) or not any(map(record.get, _KINDS)):
        return source, []
    kind, seed = record.get("kind"), record.get("seed")
    if kind == "learned":
        return None, [_note("by what was learned, and is not kept: its weights are not")]
    if kind not in ("hadamard", "random") or type(seed) is not int or not 0 <= seed < 2**32:
        words = f"qtool.json says rotation.kind {_short(kind)} and rotation.seed {_short(seed)}"
        return None, [_damaged("qtool.json", words, f"expected hadamard or random, and {_SEEDS}")]
    if not isinstance(source, Checkpoint):
        return None, [_note("and the model given is no checkpoint of safetensors: they are not")]
    from qtool.recipe.rotate import RotateOptions

    asked = {which: bool(record.get(which)) for which in _KINDS}
    options = RotateOptions(kind=kind, seed=seed, **asked)
    try:
        view = _untied(source, options)
        found = _prepared(view, options)
    except QtoolError as problem:
        return None, [_failed(problem)]
    said: dict[str, Any] = found.record(options)
    if any(said[which] != record.get(which) for which in _KINDS):
        return None, [_note("as the model given cannot be: they are not")]
    return view, [_done("qtool.json")]


def as_transformed_gguf(
    recipe: Mapping[str, object], scales: str | None, source: Path, multiple: int
) -> tuple[GgufSource | None, list[Finding]]:
    """The same of a GGUF file whose recipe has transforms. scales: the JSON of its qtool.scales.
    multiple: to which its widths were padded; 0: they were not."""
    from pydantic import ValidationError

    from qtool.checkpoints.fused_experts import apart_as
    from qtool.checkpoints.scaled import check_fits, from_json
    from qtool.gguf.from_hf.source import hf_source
    from qtool.recipe.rotate import RotateOptions

    said = recipe.get("transforms")
    chain = said if isinstance(said, list) else []
    rotates, scaled = "rotate" in chain, any(name != "rotate" for name in chain)
    try:
        options = RotateOptions.model_validate(recipe.get("rotate") if rotates else {})
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join(("rotate", *map(str, first["loc"])))
        words = f"its recipe says {key} {_short(first['input'])}"
        return None, [_damaged("qtool.recipe", words, first["msg"].lower())]
    if options.kind == "learned":
        return None, [_note("by what was learned, and is not kept: its weights are not")]
    if is_gguf(source):
        said = (
            f"the model was changed by {', '.join(map(str, chain))[:80]} and the model given is no "
            "checkpoint of safetensors: they are not compared with the source's; give the folder "
            "that it was made of"
        )
        return None, [Finding("note", CHECK if rotates else SCALES, "", said)]
    findings: list[Finding] = []
    from qtool.converting.source import opened

    try:
        record = from_json(json.loads(scales or "null")) if scaled else {}
        checkpoint = padded(apart_as(opened(source, requantize=True), record), multiple)
        view = _untied(checkpoint, options, rotates)
        if rotates:
            _prepared(view, options)
            findings.append(_done("its recipe"))
        if scaled:
            view = view.with_exact_vectors()
            check_fits(record, {name: info.shape for name, info in view.tensors.items()})
            view.scales.update(record)
            words = "compared with the source scaled as the file records it (qtool.scales)"
            findings.append(Finding("note", SCALES, "", words))
        return hf_source(view), findings
    except (ValueError, RecursionError) as problem:
        words = (
            "its recipe scales channels, and what qtool.scales says of them is damaged "
            f"({problem}): weights were not compared; fetch or make the file again"
        )
        return None, [Finding("error", SCALES, "qtool.scales", words)]
    except QtoolError as problem:
        return None, [_failed(problem)]


def _untied(source: Checkpoint, options: Any, rotates: bool = True) -> "Rotated":
    from qtool.transforms.rotated import untied

    return untied(source, stream=rotates and options.r1)


def _prepared(view: "Rotated", options: Any) -> "Rotations":
    from qtool.transforms import rotate

    return rotate.prepare(view, options, lambda _: None)


def _done(where: str) -> Finding:
    return Finding("note", CHECK, "", f"compared with the source rotated as {where} says it was")


def _failed(problem: QtoolError) -> Finding:
    return Finding("error", CHECK, "", f"the source cannot be rotated: {problem}")


def _damaged(where: str, found: str, expected: str) -> Finding:
    words = f"weights were not compared: {found} ({expected}); fetch or make the artifact again"
    return Finding("error", CHECK, where, words)


def _short(value: object) -> str:
    return json.dumps(value)[:50]


def _note(why: str) -> Finding:
    return Finding("note", CHECK, "", f"the model was rotated {why} compared with the source's")
