"""Arguments and options that several commands have, with what their help says."""

from pathlib import Path
from typing import Annotated

import typer

from qtool.cli import completing

Against = Annotated[
    str | None, typer.Option(help="the unquantized model: a folder, a hub id or an alias")
]
Artifact = Annotated[
    str, typer.Argument(help="a folder or a .gguf file, of any format that is decoded")
]
Artifacts = Annotated[list[str], typer.Argument(help="folders or .gguf files of one model")]
Calibration = Annotated[
    str | None,
    typer.Option(help="text, JSON or Parquet (texts, chats), CSV, YAML of several, hub dataset"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value in place of the recipe's own, such as weights.bits=3"),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="start over, whatever an interrupted run left")
]
Imatrix = Annotated[
    Path | None, typer.Option(help="importance matrix for GGUF, of qtool or llama-imatrix")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
KeptReference = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="keep what the reference computed: in QTOOL_CACHE or ~/.cache/qtool, 4 GB at most",
    ),
]
MaxShardSize = Annotated[str | None, typer.Option(help="such as 500MB; by default 5GB")]
MeasuredText = Annotated[
    Path,
    typer.Option(help="text, or JSON, CSV or Parquet of texts; or owner/name:FILE of a dataset"),
]
Model = Annotated[
    str,
    typer.Argument(
        help="a folder, a GGUF file, a hub id, or an alias such as `tiny`",
        autocompletion=completing.models,
    ),
]
OnDevice = Annotated[str, typer.Option(help="cpu, cuda, or auto, which is the CPU")]
Protocol = Annotated[
    str, typer.Option(help="plain, or llama.cpp: windows as llama-perplexity has them")
]
RecipeName = Annotated[
    str,
    typer.Option(
        help="a shipped recipe's name, or a YAML file", autocompletion=completing.recipe_names
    ),
]
Replace = Annotated[
    bool, typer.Option("--replace", help="take an earlier artifact's place, when whole")
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="take a model that is quantized already")
]
SampleLength = Annotated[int | None, typer.Option(min=8, help="tokens in a sample")]
Samples = Annotated[int | None, typer.Option(min=1, help="calibration samples")]
Seed = Annotated[int | None, typer.Option(help="seed of the choice of samples")]
Threads = Annotated[int | None, typer.Option(min=1, help="by default every core")]
WindowLength = Annotated[int, typer.Option(min=8, help="tokens in a window")]
Windows = Annotated[
    int | None, typer.Option(min=1, help="windows of the text; by default up to 20")
]
