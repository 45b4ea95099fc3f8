"""From what a person types to a folder on disk: a folder or file, an alias, or a hub id.

    FOLDER, FILE           of this machine, as it is
    tiny                   the model that ships with qtool
    ALIAS                  a hub id at a fixed commit
    OWNER/NAME[@REVISION]  a repository of the hub, downloaded into its cache
    OWNER/NAME:QUANT       the GGUF file of that name in it, such as Q4_K_M (llama.cpp's -hf)
    ollama:NAME[:TAG]      the GGUF file that Ollama keeps of a model
    lmstudio:OWNER/NAME    the folder that LM Studio keeps of a model

Only what quantizing needs is fetched: safetensors, JSON, tokenizer, model card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import qtool
from qtool.errors import SourceError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from qtool.messages.progress import Progress


@dataclass(frozen=True)
class HubModel:
    """A repository at one commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository + ("" if self.revision == "main" else f"@{self.revision}")


# Ungated repositories with safetensors, each at a fixed commit, so that an alias names the same
# bytes for everybody.
ALIASES = {
    "llama-7b": HubModel("huggyllama/llama-7b", "8416d3fefb0cb3ff5775a7b13c1692d10ff1aa16"),
    "tinyllama-1.1b": HubModel(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "fe8a4ea1ffedaf415f4da2f062534de366a451e6"
    ),
    "smollm2-135m": HubModel(
        "HuggingFaceTB/SmolLM2-135M", "93efa2f097d58c2a74874c7e644dbc9b0cee75a2"
    ),
    "smollm2-360m": HubModel(
        "HuggingFaceTB/SmolLM2-360M", "f8027fd0eaeea54caa13c31d31b9fdc459c38b49"
    ),
    "qwen2.5-0.5b": HubModel("Qwen/Qwen2.5-0.5B", "060db6499f32faf8b98477b0a26969ef7d8b9987"),
    "qwen3-0.6b": HubModel("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"),
    "qwen3-1.7b": HubModel("Qwen/Qwen3-1.7B", "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"),
    "qwen3-8b": HubModel("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218"),
    "pythia-160m": HubModel("EleutherAI/pythia-160m", "50f5173d932e8e61f858120bcb800b97af589f46"),
}
TINY = "tiny"

WANTED = (
    "*.safetensors",
    "*.json",
    "tokenizer.model",
    "spiece.model",
    "merges.txt",
    "vocab.txt",
    "*.tiktoken",
    "*.jinja",
    "LICENSE*",
    "README.md",  # the card: licence, base model and languages, which GGUF files record
)
# Whole copies of the weights in other formats that some repositories keep in subfolders.
UNWANTED = ("original/*", "onnx/*", "openvino/*", "coreml/*", "gguf/*", "consolidated*.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_QUANTIZED = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?):([A-Za-z0-9][\w.-]*)", re.ASCII
)
OLLAMA = "ollama:"
LM_STUDIO = "lmstudio:"


def is_hub_id(text: str) -> bool:
    """Whether `text` is written like owner/name or owner/name@revision."""
    return _HUB_ID.fullmatch(text) is not None and ".." not in text


def parse(model: str) -> HubModel | None:
    """The repository that an alias or a hub id names, or None."""
    if model in ALIASES:
        return ALIASES[model]
    if not is_hub_id(model):
        return None
    repository, _, revision = model.partition("@")
    return HubModel(repository, revision or "main")


def parse_quantized(model: str) -> tuple[HubModel, str] | None:
    """What owner/name:QUANT or owner/name@revision:QUANT names, a GGUF file; or None."""
    named = _QUANTIZED.fullmatch(model)
    found = None if named is None else parse(named[1])
    return None if named is None or found is None else (found, named[2])


def plain_name(model: str) -> str:
    """What a model is called: the last part of what was typed, without ending or number of a part.

    owner/name -> name, a/x.gguf -> x, x-00001-of-00003.gguf -> x
    """
    if Path(model).exists():
        from qtool.homes.hub_cache import repository_of

        path = Path(model)
        cached = repository_of(path)  # whose snapshots are called by their commits
        if cached is not None and path.is_dir():
            return cached[0].rpartition("/")[2]
    name = Path(model).name or Path(model).resolve().name
    name = _PART.sub("", name.removesuffix(".safetensors").removesuffix(".gguf"))
    return name.replace(":", "-")


def public_name(model: str, source: Path | None = None) -> str | None:
    """The name of a model that means the same on every machine: an alias's or hub id's, or None.

    source: what it was resolved to; of a snapshot in the hub's cache the commit is added, so that
    it means the same tomorrow.
    """
    if model == TINY:
        return TINY
    if model not in ALIASES and Path(model).exists():
        from qtool.homes.hub_cache import repository_of

        cached = repository_of(Path(model))
        if cached is None:
            return None
        return cached[0] if cached[1] is None else f"{cached[0]}@{cached[1]}"
    quantized = parse_quantized(model)
    found = parse(model) if quantized is None else quantized[0]
    if found is not None and source is not None:
        from qtool.homes.hub_cache import repository_of

        cached = repository_of(source)
        if cached is not None and cached[0] == found.repository and cached[1] is not None:
            found = HubModel(found.repository, cached[1])
    if found is None:
        return None
    return str(found) if quantized is None else f"{found}:{quantized[1]}"


def tiny_folder() -> Path:
    """Where the shipped model lies."""
    for root in qtool.__path__:
        folder = Path(root) / TINY
        if (folder / "config.json").is_file():
            return folder
    raise SourceError("the shipped model `tiny` is not installed; reinstall qtool")


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The folder or file of a model, downloaded where it is not there yet.

    An existing path wins over a hub id of the same spelling; an alias is looked up first.
    """
    if model == TINY:
        return tiny_folder()
    if not model.strip():  # of a variable of the shell that is not set, say
        raise UsageError("the model has no name; give a folder, a GGUF file, a hub id or an alias")
    path = Path(model)
    if model not in ALIASES and path.exists():
        from qtool.homes.hub_cache import newest_snapshot

        return newest_snapshot(path)
    if (stored := _stored(model)) is not None:
        return stored
    quantized = parse_quantized(model)
    if quantized is not None:
        return download_gguf(*quantized, progress)
    if model.lower().endswith((".gguf", ".safetensors")):
        raise SourceError(f"{model}: no such file or folder")
    found = parse(model)
    if found is None:
        known = ", ".join([TINY, *ALIASES])
        raise SourceError(
            f"{model}: no such file or folder, and no hub id (owner/name) or alias ({known})"
        )
    return download(found, progress)


def local(model: str) -> Path | None:
    """The same where nothing has to be asked of a hub; None where it would be."""
    if model == TINY:
        return tiny_folder()
    if Path(model).exists():
        from qtool.homes.hub_cache import newest_snapshot

        return newest_snapshot(Path(model))
    return _stored(model)


def _stored(model: str) -> Path | None:
    """A model in the store of another program."""
    if model.startswith(OLLAMA):
        from qtool.homes import ollama

        return ollama.stored_model(model.removeprefix(OLLAMA))
    if model.startswith(LM_STUDIO):
        from qtool.homes import lm_studio

        return lm_studio.stored_model(model.removeprefix(LM_STUDIO))
    return None


def download(model: HubModel, progress: Progress | None = None) -> Path:
    """The folder of a repository in the hub's cache, complete."""
    from qtool.hub.snapshot import Selection, fetch

    return fetch(model, Selection(), progress).folder


def download_gguf(model: HubModel, quant: str, progress: Progress | None = None) -> Path:
    """A GGUF file of a repository, by the end of its name."""
    from qtool.hub.asked import fetch_gguf

    found = fetch_gguf(model, quant, progress)
    return found.named or found.folder


def unusable(where: str, names: list[str]) -> SourceError | UnsupportedError:
    """Why a repository without safetensors at its top is no source."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return SourceError(
            f"{where} has only Python pickles ({pickles[0]}), which can run any code when loaded "
            "and are refused; convert it where you trust it, with transformers: "
            "AutoModelForCausalLM.from_pretrained(ID).save_pretrained(FOLDER), and the same of its "
            "AutoTokenizer"
        )
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        return UnsupportedError(
            f"{where} has only GGUF files, such as {files[0]}; name the one you want by its "
            "quantization, such as OWNER/NAME:Q8_0"
        )
    return SourceError(f"{where} has no safetensors files")
