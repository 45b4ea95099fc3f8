"""`qtool convert`, from a request to a finished artifact."""

from collections import Counter
from dataclasses import asdict, replace
from functools import partial

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.gguf_models import gguf_models
from qtool.converting import card, to_checkpoint, to_gguf
from qtool.converting.certificate import (
    Certificate,
    Converted,
    converted_of,
    provenance,
    source_record,
)
from qtool.converting.from_artifact import artifact_model
from qtool.converting.from_gguf import digest, gguf_model
from qtool.converting.fused import fused_of, stacked, teller
from qtool.converting.gguf_to_hf import convert_to_hf
from qtool.converting.model import DTYPE_NAMES, DTYPES, Model
from qtool.converting.plan import Plan, codes_plan, dense_plan, in_dtype
from qtool.converting.request import Request, say_all
from qtool.converting.resume import resumed
from qtool.errors import SourceError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.from_gguf import gguf_source
from qtool.messages.progress import Progress
from qtool.provenance.digests import add_digests
from qtool.record import FILE_NAME
from qtool.verification.engines.view import view_of
from qtool.workspaces.already import SAID, AlreadyMade
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.naming import stays_beside
from qtool.workspaces.replacing import check_apart, check_not_among


def convert(request: Request, progress: Progress) -> Converted:
    """Make the artifact; nothing is left under its name unless all of it succeeds."""
    try:
        return _made(request, progress)
    except AlreadyMade as found:
        progress.say(f"note: {SAID}")
        return converted_of(found.made, request.out)


def _made(request: Request, progress: Progress) -> Converted:
    if request.target.format != "gguf" and request.out.suffix.lower() == ".gguf":
        raise UnsupportedError(
            f"-o {request.out}: --to {request.target.name} makes a folder, not a GGUF file; choose "
            "another name, or --to gguf"
        )
    if request.out.suffix.lower() == ".safetensors":
        what = "a GGUF file" if request.target.format == "gguf" else "a folder"
        raise UnsupportedError(
            f"-o {request.out}: --to {request.target.name} makes {what}; choose another name"
        )
    check_apart(request.out, request.source)
    if request.target.format == "gguf":
        check_not_among(request.out, request.source)
    check_free(
        request.out,
        is_folder=request.target.format != "gguf",
        replace=request.replace,
        again=not request.fresh,
    )
    if (stays := stays_beside(request.out)) is not None:
        progress.say(f"note: {stays}")
    files = gguf_models(request.source)
    if not files:
        return _convert(request, artifact_model(request.source, request.assume), progress)
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise SourceError(f"{request.source}: holds {len(files)} GGUF models ({names}); name one")
    if request.assume is not None:
        raise UnsupportedError(f"{request.source}: --assume is about GPTQ's zeros; this is GGUF")
    with GgufFile.open(files[0]) as file:
        if request.target.format == "hf":
            return _gguf_to_hf(request, file, progress)
        return _convert(request, gguf_model(file), progress)


def _convert(request: Request, model: Model, progress: Progress) -> Converted:
    say_all(model.warnings, progress)
    to_checkpoint.check_floats(model)
    _keep_inputs(request, model)
    dtype = model.dtype if request.dtype is None else DTYPES[request.dtype]
    if request.target.format == "hf":
        fused, unknown = fused_of(model)
        if unknown is not None:
            say_all([unknown], progress)
            model = replace(model, warnings=(*model.warnings, unknown))
        plan = dense_plan(stacked(model, fused), dtype)
        return _folder(request, in_dtype(model, dtype), plan, progress)
    if request.target.format == "gguf":
        return to_gguf.convert(request, model, progress)
    with progress.stage("survey"):
        plan = codes_plan(request.target, model, request.lossy, dtype, progress)
    return _folder(request, model, plan, progress)


def _keep_inputs(request: Request, model: Model) -> None:
    """UnsupportedError where a format that could say how inputs are quantized would lose that."""
    if model.activations is None or request.target.format != model.format or request.lossy:
        return
    raise UnsupportedError(
        f"{model.path}: is {model.format} already, with quantized activations "
        f"({model.activations}), which writing it anew would lose; use it as it is, or give "
        "--lossy for its weights alone"
    )


def _gguf_to_hf(request: Request, file: GgufFile, progress: Progress) -> Converted:
    source = gguf_source(file)
    say_all(source.warnings, progress)
    return convert_to_hf(
        source, request.out, request.dtype, request.max_shard_bytes, progress,
        partial(resumed, request, source.path, progress), f"sha256:{digest(file)}",
    )  # fmt: skip


def _folder(request: Request, model: Model, plan: Plan, progress: Progress) -> Converted:
    """Write, compare, certify, and give the name."""
    target = request.target
    layout = to_checkpoint.layout_of(model, plan, request.max_shard_bytes)
    with resumed(request, model.path, progress, layout) as place:
        folder, journal = place.path, place.journal
        with progress.stage("export"):
            written = to_checkpoint.write(model, plan, layout, folder, journal, progress)
        with progress.stage("verify"):
            certificate = Certificate(
                source=source_record(model),
                format=target.format,
                layout=plan.options.layout,
                compared=len(plan.steps),
                matrices=len(model.quantized),
                rounded=to_checkpoint.compare(plan.steps, written, progress),
                dropped=model.dropped,
                assumed=request.assume,
                experts_by=teller() if any(step.tensor.parts for step in plan.steps) else None,
            )
        record = provenance(model, certificate)
        to_checkpoint.write_json(folder / FILE_NAME, record)
        text = card.render(target, certificate, record, view_of(Artifact.open(folder)))
        (folder / "README.md").write_text(text, encoding="utf-8")
        add_digests(folder)
        leaves = (leaf for step in plan.steps if step.scheme is None for leaf in step.tensor.leaves)
        plain = Counter(leaf.stored for leaf in leaves if leaf.read is not None)
        made = Converted(
            artifact=str(request.out),
            certificate=certificate,
            architecture=model.architecture,
            dtype=DTYPE_NAMES[model.dtype],
            tensors=len(plan.steps),
            size_bytes=written.size_bytes,
            dequantized=dict(plain),
            warnings=model.warnings,
        )
        place.conclude(asdict(made))
    return made
