"""The same for GGUF files: the header against its architecture, then every block once."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from qtool.checkpoints.gguf_models import gguf_models, is_gguf
from qtool.checkpoints.padding import asked_in, not_compared, padded, padded_as
from qtool.errors import QtoolError
from qtool.gguf.open import open_source
from qtool.gguf.source import GgufSource
from qtool.gguf_types import BY_NAME
from qtool.messages.progress import Progress
from qtool.provenance import embedded
from qtool.record import CHECKSUM_KEY, RECIPE_KEY, SCALES_KEY
from qtool.verification import unlike_settings
from qtool.verification.against import compensated, swapped, to_nearest
from qtool.verification.finding import Finding, LayerError, Verdict
from qtool.verification.gguf import against as tensors_against
from qtool.verification.gguf import header, layer_errors, scales, settings, values
from qtool.verification.gguf.layer_errors import Made
from qtool.verification.gguf.sums import Sums, add_up


def verify_gguf(
    path: Path,
    against: Path | None,
    engine: str | None,
    tp: int,
    progress: Progress | None,
    threads: int,
) -> Verdict:
    """All that is wrong with a GGUF model."""
    checks = ["readable"]
    findings: list[Finding] = []
    with ExitStack() as stack:
        try:
            file = stack.enter_context(closing(open_source(path)))
        except QtoolError as problem:
            findings.append(Finding("error", "readable", "", str(problem)))
            findings.append(Finding("note", "readable", "", "nothing else was checked"))
            return Verdict(str(path), "gguf", engine, tp, tuple(findings), (), tuple(checks), 0.0)
        findings += header.check_ends(gguf_models(path)[0])
        source = None
        if against is not None:
            source, said = _source(path, file, against)
            findings += said
            if source is not None:
                stack.enter_context(closing(source))
        other = header.other_than_a_model(file)
        if other is not None:
            words = f"the file is {other}, no language model: only its numbers were checked"
            findings.append(Finding("note", "keys", "", words))
            checks.append("keys")
        for name, check in header.CHECKS if other is None else ():
            checks.append(name)
            try:
                findings += check(file)
            except QtoolError as problem:
                findings.append(Finding("error", name, "", str(problem)))

        def steps(count: int) -> Iterable[int]:
            return range(count) if progress is None else progress.blocks(count, "step")

        checks.append("values")
        numbers = file
        try:
            numbers, source = scales.multiplied(file, source)
        except QtoolError as problem:
            findings.append(Finding("error", "values", "", str(problem)))
        sums = add_up(numbers, source, threads, steps)
        findings += values.check_values(sums)
        layers: list[LayerError] = []
        if source is not None:
            checks += ["against", "layer-error", swapped.CHECK, "provenance"]
            checks += [unlike_settings.CHECK, unlike_settings.VOCABULARY]
            findings += tensors_against.check_against(numbers, source)
            findings += settings.check_settings(file, source)
            findings += settings.check_vocabulary(file, source)
            findings += layer_errors.check_errors(sums, source, _made(path, file))
            findings += _provenance(file, sums)
            layers = layer_errors.layer_errors(sums)
        if engine is not None and other is None:
            from qtool.verification.engines.rules import engine_findings

            checks.append("engine")
            findings += engine_findings(file, engine, tp)
        total = sum(tensor.rows * tensor.in_features for tensor in file.tensors)
        dense = sum(t.rows * t.in_features for t in file.tensors if t.type.name not in BY_NAME)
    return Verdict(
        str(path),
        "gguf",
        engine,
        tp,
        tuple(findings),
        tuple(layers),
        tuple(checks),
        dense / total if total else 0.0,
    )


def _source(path: Path, file: GgufSource, against: Path) -> tuple[GgufSource | None, list[Finding]]:
    """What the file is to be compared with, transformed where it is; None where nothing is."""
    if RECIPE_KEY not in file.metadata:
        return _as_wide(against, file), []
    try:
        recipe = embedded.read(path).recipe
    except QtoolError as problem:
        said = f"{problem}; it is compared with the source as that is"
        return open_source(against, requantize=True), [
            Finding("warning", "provenance", RECIPE_KEY, said)
        ]
    multiple = asked_in(recipe)
    if not isinstance(recipe.get("transforms"), list):
        return _padded(against, multiple) if multiple else (_as_wide(against, file), [])
    from qtool.verification.against.rotated import as_transformed_gguf

    scales = file.metadata.get(SCALES_KEY)
    said_scales = None if scales is None else str(scales.value)
    return as_transformed_gguf(recipe, said_scales, against, multiple)


def _as_wide(against: Path, file: GgufSource) -> GgufSource:
    """The source, padded where the file has larger widths: made of a padded model, or padded by
    another tool."""
    from qtool.converting.source import opened
    from qtool.gguf.from_hf.source import hf_source
    from qtool.gguf.to_hf.model import hf_model

    source = open_source(against, requantize=True)
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    inner = (tensor for tensor in file.tensors if "ffn_down" in tensor.name)
    if is_gguf(against) or all(shapes.get(one.name, one.shape) == one.shape for one in inner):
        return source
    with suppress(QtoolError):  # of an architecture without a way back
        checkpoint = padded_as(opened(against, requantize=True), hf_model(file).config)
        return hf_source(checkpoint)
    return source


def _padded(against: Path, multiple: int) -> tuple[GgufSource | None, list[Finding]]:
    """The source with the widths of the file."""
    from qtool.converting.source import opened
    from qtool.gguf.from_hf.source import hf_source

    if is_gguf(against):
        return None, [Finding("note", "against", "", not_compared(multiple))]
    return hf_source(padded(opened(against, requantize=True), multiple)), []


def _made(path: Path, file: GgufSource) -> Made:
    """How the matrices were made, by the recipe in the file."""
    weighed = any(key.startswith("quantize.imatrix.") for key in file.metadata)
    try:
        recipe = embedded.read(path).recipe if RECIPE_KEY in file.metadata else {}
    except QtoolError:
        recipe = {}  # of which _source() tells
    plain = to_nearest.to_nearest(recipe) is not False and not recipe.get("transforms")
    return Made(compensated.compensates(recipe), plain and not weighed)


def _provenance(file: GgufSource, sums: Sums) -> Iterator[Finding]:
    """provenance: the checksum of its source that the file states is that of this source."""
    said = file.metadata.get(CHECKSUM_KEY)
    found = tensors_against.source_digest(sums)
    if said is not None and found is not None and str(said.value) != found:
        yield Finding(
            "warning", "provenance", CHECKSUM_KEY,
            f"the file says it was made of weights with the checksum {said.value}, and this "
            f"source has {found}: another model, or other dtypes",
        )  # fmt: skip
