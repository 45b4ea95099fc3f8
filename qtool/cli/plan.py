"""`qtool plan`: what a recipe will do to a model, before any of it is done."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qtool.cli import completing
from qtool.printable import printable

if TYPE_CHECKING:
    from qtool.gguf.planned import GgufPlan
    from qtool.gguf.recipe import GgufRecipe
    from qtool.plan.budget import Memory
    from qtool.plan.plan import Plan
    from qtool.plan.rows import Row
    from qtool.recipe.file import Calibration
    from qtool.recipe.recipe import Recipe
    from qtool.verification.finding import Finding


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="a folder, a GGUF file, a hub id, or an alias such as `tiny`",
            autocompletion=completing.models,
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            help="a shipped recipe's name, or a YAML file",
            autocompletion=completing.recipe_names,
        ),
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value put over the recipe's own")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="text, JSONL (texts, chats), CSV, YAML of several, or a hub dataset"),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="calibration samples")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens in a sample")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="such as 500MB; by default 5GB")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="importance matrix for GGUF, of qtool or llama-imatrix")
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="take a GGUF file that is quantized already")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="of the run; by default every core")
    ] = None,
    max_ram: Annotated[
        str | None, typer.Option(help="memory that the run may take, such as 4GiB")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="what will load it: vllm, sglang, transformers, llama.cpp, exllama or mlx-lm",
            autocompletion=completing.engines,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that the engine shares it between")] = 1,
    all_: Annotated[bool, typer.Option("--all", help="a line for every tensor")] = False,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Say what RECIPE will make of MODEL: each tensor, the size, memory and time.

    With --engine also what that engine would refuse; exit status 1 where it would.
    """
    from qtool.errors import UsageError
    from qtool.formats.safetensors_file import parse_size
    from qtool.plan.notes import unread
    from qtool.recipe.described import methods
    from qtool.recipe.recipe import Recipe, calibration_sets, load
    from qtool.runs.quantize import reads_text, refuse

    if engine is None and tp != 1:
        raise UsageError("--tp is asked without --engine; name the engine, such as --engine vllm")
    if engine is not None:
        from qtool.verification.engine_rules import check_engine

        check_engine(engine, tp)
    loaded = load(recipe, (set_ or []) + calibration_sets(calibration, samples, length, None))
    ram = None if max_ram is None else parse_size(max_ram, "--max-ram")
    findings: list[Finding] = []
    made: Plan | GgufPlan
    if isinstance(loaded, Recipe):
        refuse(loaded, "makes no GGUF file", {"--imatrix": imatrix})
        calibrates = loaded.calibrates
        unusable = _unusable(loaded.calibration, calibration) if calibrates else None
        made, config = _plan(model, loaded, max_shard_size or "5GB", threads, ram, requantize)
        made = replace(made, warnings=(*made.warnings, *unread(loaded)))
        if engine is not None:
            findings = _findings(made, config, engine, tp)
    else:
        refuse(loaded, "makes one GGUF file", {"--max-shard-size": max_shard_size})
        given = {"--calibration": calibration, "--samples": samples, "--length": length}
        named = [name for name, one in given.items() if one is not None]
        calibrates = reads_text(loaded, imatrix, named)
        unusable = _unusable(loaded.calibration, calibration) if calibrates else None
        made = _plan_gguf(model, loaded, imatrix, requantize, threads, ram)
        if engine is not None:
            from qtool.verification.engine_rules import type_findings

            types = {tensor.name: tensor.type for tensor in made.tensors}
            architecture = str(made.metadata["general.architecture"].value)
            findings = type_findings(architecture, types, engine, tp)
    if unusable is not None:
        made = replace(made, warnings=(*made.warnings, unusable))
    if json_:
        asked = {} if engine is None else {"engine": engine, "tp": tp}
        found = {} if engine is None else {"findings": [vars(finding) for finding in findings]}
        typer.echo(json.dumps(made.json() | asked | found))
    else:
        how = methods(loaded) if calibrates else None
        _print_any(made, all_, engine is not None, how)
        for finding in findings:
            typer.echo(printable(f"{finding.severity}: {finding.message}"))
        if engine is not None and not findings:
            typer.echo(f"note: {engine} has nothing to say against it, as far as shapes tell")
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


def _plan(
    model: str,
    recipe: "Recipe",
    max_shard_size: str,
    threads: int | None,
    max_ram: int | None,
    requantize: bool,
) -> "tuple[Plan, Mapping[str, Any]]":
    """And the model's config."""
    from qtool.checkpoint import Checkpoint
    from qtool.formats.safetensors_file import parse_size
    from qtool.gguf.open import is_gguf
    from qtool.hub import resolve
    from qtool.plan.experts import as_quantized
    from qtool.plan.plan import make_plan
    from qtool.runs.quantize import refuse

    max_shard_bytes = parse_size(
        max_shard_size, "--max-shard-size"
    )  # before a download that may take hours
    source = resolve(model)

    def planned(folder: Path) -> "tuple[Plan, Mapping[str, Any]]":
        opened = as_quantized(recipe, Checkpoint.open(folder))
        made = make_plan(recipe, opened, max_shard_bytes, threads=threads, max_ram=max_ram)
        return made, opened.config

    if not is_gguf(source):
        refuse(recipe, f"does not read {source} as GGUF", {"--requantize": requantize})
        return planned(source)
    from qtool.gguf.checkpoint_headers import checkpoint_headers

    with checkpoint_headers(source, requantize=requantize) as (folder, said):
        made, config = planned(folder)
    return replace(made, warnings=(*said, *made.warnings)), config


def _unusable(text: "Calibration", named: str | None) -> str | None:
    """What a run will fail for: no plan looks at the text. SourceError where that is named on the
    command line, and of no use; a recipe's may be replaced."""
    from qtool.calibrating.mixture import check_source, too_few_bytes
    from qtool.errors import SourceError

    try:
        check_source(text.source)
    except SourceError as error:
        if named is not None:
            raise
        return f"calibration.source: {error}; `qtool quantize` fails on it, unless given another"
    found = too_few_bytes(text.source, text.samples * text.length)
    if found is None:
        return None
    return (
        f"the calibration text ({text.source}) has {found:,} bytes, too few for {text.samples} "
        f"samples of {text.length} tokens; `qtool quantize` fails on it: give a longer text, or "
        "fewer or shorter samples (--samples, --length)"
    )


def _findings(made: "Plan", config: Mapping[str, Any], engine: str, tp: int) -> "list[Finding]":
    """What an engine says of the artifact that is planned."""
    from qtool.runs.planned_view import expected, planned_view
    from qtool.verification.engine_rules import view_findings

    return view_findings(planned_view(made, config, expected(made, config)), engine, tp)


def _plan_gguf(
    model: str,
    recipe: "GgufRecipe",
    imatrix: Path | None,
    requantize: bool,
    threads: int | None,
    max_ram: int | None,
) -> "GgufPlan":
    from qtool.gguf.from_hf import hf_source
    from qtool.gguf.imatrix import read_importance
    from qtool.gguf.open import open_source, open_view
    from qtool.gguf.plan import make_gguf_plan
    from qtool.hub import public_name, resolve

    path = resolve(model)
    view = open_view(path, recipe, imatrix)
    importance = None if imatrix is None else read_importance(imatrix)
    source = open_source(path) if view is None else hf_source(view)
    return make_gguf_plan(
        recipe,
        source,
        importance,
        requantize=requantize,
        origin=public_name(model, path),
        threads=threads,
        max_ram=max_ram,
    )


def _print_any(made: "Plan | GgufPlan", every: bool, engine: bool, how: str | None) -> None:
    """how: by which methods, where these look at activations."""
    from qtool.plan.plan import Plan

    _print(made, every, engine, how) if isinstance(made, Plan) else _print_gguf(made, every, how)


def _print(made: "Plan", every: bool, engine: bool, how: str | None) -> None:
    """engine: whether one is named, which says for itself what it refuses."""
    from qtool.plan.engines import told_of_one
    from qtool.plan.rows import rows, scheme_of

    _table(rows(made.tensors, scheme_of, every), "scheme")
    counts = ", ".join(f"{count} {kind}" for kind, count in made.counts.items())
    files = len(made.layout.files)
    typer.echo(f"recipe {made.recipe.name}, format {made.format}: {counts}")
    if how is not None:
        typer.echo(f"methods: {how}")
    typer.echo(
        f"size {made.size_bytes:,} bytes in {files} file{'s' if files > 1 else ''}, "
        f"{made.bits_per_weight:.3f} bits per weight, "
        f"{made.unquantized_share:.1%} of the weights left unquantized"
    )
    twice = told_of_one(made.recipe, made.tensors) if engine else []
    _end(made.memory, made.seconds, [text for text in made.warnings if text not in twice])


def _print_gguf(made: "GgufPlan", every: bool, how: str | None) -> None:
    from qtool.plan.rows import rows, type_of
    from qtool.runs.summary import not_written

    _table(rows(made.tensors, type_of, every), "type")
    if every:
        for name, reason in made.dropped:
            typer.echo(printable(f"not written: {name} ({reason})"))
    else:
        for line in not_written(made.dropped):
            typer.echo(printable(line))
    counts = ", ".join(f"{count} {kind}" for kind, count in made.counts.items())
    types = ", ".join(f"{count} {name}" for name, count in made.types.items())
    typer.echo(f"recipe {made.recipe.name}, format gguf: {counts}")
    if how is not None:
        typer.echo(f"methods: {how}")
    typer.echo(f"types: {types}; {len(made.fallbacks)} of them fallbacks")
    about = "about " if made.recipe.calibrates else ""  # it will tell of what is yet to be measured
    typer.echo(f"size {about}{made.size_bytes:,} bytes, {made.bits_per_weight:.3f} bits per weight")
    _end(made.memory, made.seconds, made.warnings)


def _table(rows: "Iterable[Row]", stored: str) -> None:
    from qtool.cli.tables import print_table
    from qtool.table import Table

    cells = [(row.name, row.shape, row.stored, str(row.count), f"{row.nbytes:,}") for row in rows]
    print_table(Table(("tensor", "shape", stored, "tensors", "bytes"), cells, 3))


def _end(memory: "Memory", seconds: float, warnings: Iterable[str]) -> None:
    from qtool.verification.sentences import count

    disk = memory.disk_bytes / 1e9
    meanwhile = f"{disk:.1f} GB of disk beside the artifact, " if disk >= 1 else ""
    typer.echo(
        f"estimated: peak memory {_memory(memory.estimated.nbytes)}, {meanwhile}"
        f"time {_duration(seconds)} with {count(memory.setting.threads, 'thread')}"
    )
    if memory.max_ram_bytes is not None:
        typer.echo(memory.line())
    for warning in warnings:
        said = f"warning: {warning}" if not warning.startswith("note:") else warning
        typer.echo(printable(said))


def _memory(nbytes: int) -> str:
    """With three digits at least, in the unit that --max-ram is given in."""
    mib = nbytes / 2**20
    if mib >= 10240:
        return f"{mib / 1024:.1f} GiB"
    return f"{mib:.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
