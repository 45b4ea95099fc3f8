"""`qtool convert`, from a request to a finished artifact."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from qtool.convert import card, to_checkpoint
from qtool.convert.certificate import (
    FILE_NAME,
    Certificate,
    Converted,
    provenance,
    source_record,
)
from qtool.convert.from_artifact import artifact_model
from qtool.convert.model import DTYPE_NAMES, DTYPES, Model
from qtool.convert.plan import Plan, codes_plan, dense_plan, in_dtype
from qtool.convert.targets import Target
from qtool.errors import UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.convert import convert_to_hf
from qtool.gguf.from_gguf import gguf_source
from qtool.gguf.open import is_gguf
from qtool.progress import Progress
from qtool.staging import check_out, staged


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    source: Path
    target: Target
    out: Path
    lossy: bool = False
    dtype: str | None = None  # of what is dequantized
    assume: str | None = None  # v1 or v2: how GPTQ's zeros are stored, whatever the config says
    max_shard_bytes: int = 5_000_000_000


def convert(request: Request, progress: Progress) -> Converted:
    """Make the artifact; nothing is left under its name unless all of it succeeds."""
    if is_gguf(request.source):
        return _from_gguf(request, progress)
    check_out(request.out)
    model = artifact_model(request.source, request.assume)
    to_checkpoint.check_floats(model)
    for warning in model.warnings:
        progress.say(f"warning: {warning}")
    if request.target.format == "hf":
        dtype = model.dtype if request.dtype is None else DTYPES[request.dtype]
        return _folder(request, in_dtype(model, dtype), dense_plan(model, dtype), progress)
    with progress.stage("survey"):
        plan = codes_plan(request.target, model, request.lossy, progress)
    return _folder(request, model, plan, progress)


def _from_gguf(request: Request, progress: Progress) -> Converted:
    if request.target.format != "hf":
        raise UnsupportedError(
            f"{request.source}: a GGUF file becomes hf in this version, not {request.target.name}"
        )
    check_out(request.out)
    with GgufFile.open(request.source) as file:
        source = gguf_source(file)
        made = convert_to_hf(
            source, request.out, request.dtype, request.max_shard_bytes, progress,
            f"sha256:{gguf_digest(file)}",
        )  # fmt: skip
    return Converted(
        artifact=made.artifact,
        target=request.target,
        certificate=made.certificate,
        architecture=made.architecture,
        dtype=made.dtype,
        tensors=made.tensors,
        size_bytes=made.size_bytes,
        dequantized=made.dequantized,
        warnings=made.warnings,
    )


def gguf_digest(file: GgufFile) -> str:
    """SHA-256 of a model's only file, or over the digests of its parts."""
    digests = []
    for path in file.files:
        with path.open("rb") as part:
            digests.append(hashlib.file_digest(part, "sha256").hexdigest())
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{one}\n" for one in digests).encode()).hexdigest()


def _folder(request: Request, model: Model, plan: Plan, progress: Progress) -> Converted:
    """Write, compare, certify, and give the name."""
    target = request.target
    with staged(request.out) as folder:
        with progress.stage("export"):
            written = to_checkpoint.write(model, plan, folder, request.max_shard_bytes, progress)
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
            )
        record = provenance(model, certificate)
        to_checkpoint.write_json(folder / FILE_NAME, record)
        text = card.render(target, certificate, record)
        (folder / "README.md").write_text(text, encoding="utf-8")
    plain = Counter(s.tensor.stored for s in plan.steps if s.tensor.read and s.scheme is None)
    return Converted(
        artifact=str(request.out),
        target=target,
        certificate=certificate,
        architecture=_architecture(model),
        dtype=DTYPE_NAMES[model.dtype],
        tensors=len(plan.steps),
        size_bytes=written.size_bytes,
        dequantized=dict(plain),
        warnings=model.warnings,
    )


def _architecture(model: Model) -> str | None:
    names = model.config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None
