"""A model's name and a recipe into an artifact: what `qtool quantize` and `qtool.quantize` do."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.errors import UnsupportedError
from qtool.workspaces.naming import path_beside, stays_beside

if TYPE_CHECKING:
    from qtool.cuda.staging import Places
    from qtool.messages.progress import Progress
    from qtool.messages.summary import Summary
    from qtool.recipe.gguf import GgufRecipe
    from qtool.recipe.recipe import Recipe
    from qtool.workspaces.naming import Stating
    from qtool.workspaces.replacing import Replace

_GGUF = ".gguf"
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Asked:
    """What was asked for, as far as both kinds of recipe know it."""

    model: str
    out: Path | None
    stats: Path | None
    imatrix: Path | None
    max_shard_size: str | None
    requantize: bool
    fresh: bool
    threads: int
    max_ram: int | None
    calibration: list[str]  # the options given that are about it
    modelfile: bool = False  # for Ollama, beside a GGUF file
    provenance: bool = False  # a statement, beside the artifact
    device: str = "auto"  # or cpu, which is the same, or cuda: see request.check_device
    replace: bool = False  # an earlier artifact of that name


def quantize(recipe: Recipe | GgufRecipe, asked: Asked, progress: Progress) -> Summary:
    """Make the artifact. What can be told before a download that may take hours is."""
    from qtool.recipe.recipe import Recipe

    if isinstance(recipe, Recipe):
        return _to_safetensors(recipe, asked, progress)
    return _to_gguf(recipe, asked, progress)


def _to_safetensors(recipe: Recipe, asked: Asked, progress: Progress) -> Summary:
    from qtool.checkpoints.gguf_models import is_gguf
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import public_name, resolve
    from qtool.texts.mixture import check_source

    refuse(
        recipe,
        "makes no GGUF file",
        {"--imatrix": asked.imatrix, "--modelfile": asked.modelfile},
    )
    if asked.out is not None and asked.out.suffix.lower() == _GGUF:
        raise UnsupportedError(
            f"-o {asked.out}: recipe {recipe.name} makes a folder of safetensors, not a GGUF file; "
            "choose another name, or a recipe that makes one, such as q4_k_m"
        )
    if asked.out is not None and asked.out.suffix.lower() == _SAFETENSORS:
        raise UnsupportedError(
            f"-o {asked.out}: recipe {recipe.name} makes a folder, with config.json and tokenizer "
            f"beside the weights; name it without {_SAFETENSORS}"
        )
    max_shard_bytes = parse_size(asked.max_shard_size or "5GB", "--max-shard-size")
    if recipe.calibrates and asked.stats is None:
        check_source(recipe.calibration.source)
    from qtool.converting.source import check_needed
    from qtool.quantizing.pipeline import run
    from qtool.runs.request import (
        Request,
        artifact_path,
        check_max_ram,
        check_stats_options,
        device_of,
    )
    from qtool.workspaces.leftovers import check_free
    from qtool.workspaces.replacing import check_apart

    check_stats_options(asked.stats, asked.calibration)
    check_max_ram(asked.device, asked.max_ram)
    device = device_of(asked.device)
    target = artifact_path(asked.model, recipe, asked.out)
    check_apart(target, *_typed(asked))
    check_free(target, is_folder=True, replace=_replace(asked), again=not asked.fresh)
    with progress.stage("download"):
        source = resolve(asked.model, progress)
    replacing = _replace(asked, source)
    # Before a checkpoint is made beside it.
    check_free(target, is_folder=True, replace=replacing, again=not asked.fresh)
    gpu = None if device is None else device.name
    stating = _stating(asked, source, target, progress, gpu)

    # Where the folder is made of a GGUF file of the hub, nothing in it tells the commit.
    named = public_name(asked.model, source) or asked.model

    def made_of(folder: Path) -> Summary:
        request = Request(
            named, folder, recipe, target, asked.stats, asked.threads, max_shard_bytes,
            asked.fresh, asked.max_ram, stating, device, replacing,
            asked.requantize and not is_gguf(source),
        )  # fmt: skip
        return run(request, progress)

    if not is_gguf(source):
        check_needed(source, asked.requantize)
        return made_of(source)
    from qtool.checkpoints.checkpoint import Checkpoint
    from qtool.converting.gguf_to_hf import checkpoint_folder
    from qtool.gguf.to_hf.checkpoint_headers import checkpoint_headers
    from qtool.planning.experts import as_quantized
    from qtool.planning.plan import make_plan

    with checkpoint_headers(source, requantize=asked.requantize) as (folder, _):
        # What cannot be made is told before the checkpoint is.
        make_plan(
            recipe, as_quantized(recipe, Checkpoint.open(folder)), max_shard_bytes,
            threads=asked.threads, max_ram=asked.max_ram,
        )  # fmt: skip
    with checkpoint_folder(
        source, target, progress, requantize=asked.requantize, fresh=asked.fresh
    ) as folder:
        return made_of(folder)


def _to_gguf(recipe: GgufRecipe, asked: Asked, progress: Progress) -> Summary:
    from qtool.hub import resolve
    from qtool.quantizing.gguf.quantize import run_gguf
    from qtool.runs.gguf_request import GgufRequest, artifact_path, unlike_gguf
    from qtool.texts.mixture import check_source
    from qtool.workspaces.leftovers import check_free
    from qtool.workspaces.replacing import check_apart, check_not_among

    refuse(
        recipe,
        "makes a GGUF file, for which everything is measured in its own run, but for importance, "
        "which --imatrix may give",
        {"--stats": asked.stats},
    )
    refuse(recipe, "makes one GGUF file", {"--max-shard-size": asked.max_shard_size})
    if reads_text(recipe, asked.imatrix, asked.calibration):
        check_source(recipe.calibration.source)
    places = _places(asked)
    device = None
    if recipe.sweeps:  # of all others the bytes are the CPU's
        from qtool.runs.request import device_of

        device = device_of(asked.device)
    target = artifact_path(asked.model, recipe, asked.out)
    if target.suffix.lower() == _SAFETENSORS:
        raise UnsupportedError(
            f"-o {target}: recipe {recipe.name} makes a GGUF file; choose a name that ends in "
            f"{_GGUF}, or a recipe that makes a folder of safetensors, such as w4g128-awq"
        )
    check_apart(target, *_typed(asked))
    check_free(target, is_folder=False, replace=_replace(asked), again=not asked.fresh)
    if asked.modelfile:
        from qtool.homes.ollama import is_modelfile_of, modelfile_path

        if not (asked.replace and is_modelfile_of(target)):
            check_free(modelfile_path(target), is_folder=False)
    with progress.stage("download"):
        source = resolve(asked.model, progress)
    check_not_among(target, source)
    gpu = None if device is None else device.name
    stating = _stating(asked, source, target, progress, gpu)
    request = GgufRequest(
        asked.model, source, recipe, asked.out, asked.threads, asked.imatrix, asked.requantize,
        asked.fresh, asked.max_ram, stating, places, device, _replace(asked, source),
    )  # fmt: skip
    made = run_gguf(request, progress)
    if asked.modelfile:
        from qtool.homes.ollama import write_modelfile

        write_modelfile(Path(made.artifact))
    return replace(made, notes=[*made.notes, *unlike_gguf(target)])


def _typed(asked: Asked) -> list[Path]:
    """The model as a path, where it may be one."""
    from qtool.hub import ALIASES, TINY

    return [] if asked.model in (TINY, *ALIASES) else [Path(asked.model)]


def _replace(asked: Asked, source: Path | None = None) -> Replace | None:
    """None where nothing is replaced; `source`: where it is known."""
    from qtool.workspaces.replacing import Replace, replace_of

    if not asked.replace:
        return None
    others = [path for path in (asked.imatrix, asked.stats) if path is not None]
    return Replace(tuple(others)) if source is None else replace_of(source, *others)


def _places(asked: Asked) -> Places | None:
    """Where GGUF blocks are encoded, if on a GPU; `check_device` has seen that there is one."""
    from qtool.runs.request import check_max_ram

    check_max_ram(asked.device, asked.max_ram)
    if asked.device != "cuda":
        return None
    from qtool.cuda.staging import places

    return places()


def _stating(
    asked: Asked, source: Path, target: Path, progress: Progress, gpu: str | None = None
) -> Stating | None:
    """What states OUT.provenance.json, where it is asked for: of the inputs as they are now."""
    from qtool.messages.summary import peak_rss_bytes
    from qtool.provenance import statement

    there = path_beside(target)
    if not asked.provenance:
        if (stays := stays_beside(target)) is not None:
            progress.say(f"note: {stays}, or give --provenance, which replaces it")
        return None
    if there.is_dir():
        raise UnsupportedError(
            f"{there}: a folder is in the way of the statement; choose another -o"
        )
    beside, began = statement.digests_beside(source), time.time()

    def state(artifact: Path) -> tuple[Path, str]:
        seconds = {**progress.seconds, "total": progress.total()}
        ran = statement.Ran(
            asked.model,
            source,
            asked.threads,
            {name: round(value, 3) for name, value in seconds.items()},
            peak_rss_bytes(),
            began,
            asked.imatrix,
            asked.stats,
            beside,
            gpu,
        )
        return there, statement.text(artifact, ran, target)

    return state


def reads_text(recipe: GgufRecipe, imatrix: Path | None, options: Collection[str]) -> bool:
    """Whether a run calibrates; UnsupportedError where options about that are given, and what they
    are about was measured before."""
    if imatrix is not None and not (recipe.sweeps or recipe.transforms):
        refuse(recipe, f"takes importance from {imatrix}", dict.fromkeys(options, True))
        return False
    return recipe.calibrates


def refuse(recipe: Recipe | GgufRecipe, why: str, options: Mapping[str, object]) -> None:
    """UnsupportedError where options are given that change nothing with this recipe."""
    given = [name for name, value in options.items() if value]
    if given:
        raise UnsupportedError(
            f"{', '.join(given)} would change nothing: recipe {recipe.name} {why}; leave it out"
        )
