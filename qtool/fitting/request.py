"""What is asked of `qtool fit`, and what it found. Importing it is quick: no torch."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import UsageError
from qtool.gguf_mixtures.table import TYPES
from qtool.gguf_types import FLOATS, BlockType
from qtool.recipe.file import Calibration, did_you_mean
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe

if TYPE_CHECKING:
    from qtool.cuda.device import Device
    from qtool.fitting.allocate import Candidate
    from qtool.fitting.ways import Made
    from qtool.messages.progress import Progress
    from qtool.planning.budget import Memory

BITS = (0.1, 32)  # a weight, that may be asked for
SAMPLES = 16  # of the text, unless more are asked for
# Between these there is a type for every half a bit; larger ones gain nothing.
USUAL = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
USUAL_WIDTHS = (4, 8)  # that fast kernels know
MLX_WIDTHS = (3, 4, 5, 6, 8)  # which mlx-lm's know all
# Of how far apart unrelated predictions are: losses up to there come true, measured (docs/fit.md).
_RELIED = 0.25
_OR_BITS = "; numbers of bits go with recipes of gptq, compressed-tensors and mlx, such as w4a16-ct"
_LAYER = re.compile(r"\.?\b\d+\b")


def block_types(text: str | None) -> tuple[BlockType, ...]:
    """`q3_k,q4_k` as types; UsageError for what is none that a matrix is quantized to."""
    names = USUAL if text is None else [name.strip().upper() for name in text.split(",")]
    found = []
    for name in names:
        kind = TYPES.get(name)
        if kind is None or kind in FLOATS:
            known = [one for one, block in TYPES.items() if block not in FLOATS]
            near = did_you_mean(name, known, 3)
            raise UsageError(
                f"--types: {name.lower() or 'nothing'} is no type that matrices are quantized to; "
                f"{near or 'expected some of ' + ', '.join(known).lower()}{_OR_BITS}"
            )
        found.append(kind)
    return tuple(dict.fromkeys(found))


def widths(text: str | None, format_: str) -> tuple[int, ...]:
    """`4,8` as bits, or those that are usual in a format; UsageError for what is none."""
    usual = MLX_WIDTHS if format_ == "mlx" else USUAL_WIDTHS
    names = list(map(str, usual)) if text is None else [n.strip() for n in text.split(",")]
    if wrong := [name for name in names if name not in map(str, range(2, 9))]:
        raise UsageError(
            f"--types: {wrong[0] or 'nothing'} is no number of bits from 2 to 8, which matrices of "
            "this recipe have; write it like 4,8 (types of GGUF go with recipes such as q4_k_m)"
        )
    return tuple(sorted({int(name) for name in names}))


def check_name(out: Path) -> None:
    """UsageError for a file that could not be taken for a recipe."""
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"-o {out}: a recipe's file ends in .yaml")


def check_files(request: FitRequest) -> None:
    """UsageError, SourceError for outputs that cannot be written, before any work."""
    check_name(request.out)
    costs = request.costs
    if costs is None or costs.is_file():
        return
    from qtool.workspaces.replacing import check_not_among

    check_not_among(costs, request.source)
    if costs.absolute() == request.out.absolute():
        raise UsageError(f"--costs {costs}: the recipe goes there (-o); choose another name")
    from qtool.quantizing.named import check_absent

    check_absent(costs)


@dataclass(frozen=True)
class FitRequest:
    """One of `size_bytes` and `bits` is given."""

    source: Path
    recipe: Recipe | GgufRecipe
    settings: Calibration  # of the text that is measured
    out: Path
    size_bytes: int | None  # of the artifact's tensor files
    bits: float | None  # a weight, all tensors counted
    types: str | None  # to choose among
    costs: Path | None
    threads: int
    fresh: bool = False
    requantize: bool = False  # tensors of a quantized type may be encoded anew
    max_ram: int | None = None  # bytes of resident memory
    kept_keys: frozenset[str] = frozenset()  # of the recipe's `mlx` table, which stay as they are
    device: Device | None = None  # where blocks are passed; None: the CPU


def fit_request(
    model: str,
    recipe: str,
    out: Path,
    *,
    size: str | int | None,
    bits: float | None,
    types: str | Sequence[str] | None,
    text: Mapping[str, Any],
    sets: Sequence[str],
    costs: Path | None,
    threads: int,
    max_ram: str | None,
    fresh: bool,
    requantize: bool,
    progress: Progress,
    device: str = "auto",
) -> FitRequest:
    """From what a user says; the model is fetched where it is not there.

    text: calibration, samples, length and seed, None where not given. sets: `key=value` put over
    the recipe's own. UsageError.
    """
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.recipe.recipe import calibration_sets, find, load, shipped
    from qtool.runs.request import check_max_ram, device_of
    from qtool.workspaces.leftovers import check_free

    if (size is None) == (bits is None):
        raise UsageError("give either --size, such as 4.2GB, or --bits, such as 4.5")
    least, most = BITS
    if bits is not None and not (isinstance(bits, int | float) and least <= bits <= most):
        raise UsageError(f"--bits {bits}: expected a number from {least} to {most}")
    check_name(out)
    check_free(out, is_folder=False, again=not fresh)
    nbytes = None if size is None else parse_size(str(size), "--size")
    types = types if types is None or isinstance(types, str) else ",".join(map(str, types))
    base = load(recipe, sets)
    said = dict(text)
    if said["samples"] is None and "samples" not in base.calibration.model_fields_set:
        said["samples"] = SAMPLES
    more = calibration_sets(said["calibration"], said["samples"], said["length"], said["seed"])
    settings = load(recipe, [*sets, *more]).calibration
    if isinstance(base, GgufRecipe):  # told before a download
        block_types(types)
    else:
        widths(types, base.format)
    room = None if max_ram is None else parse_size(max_ram, "--max-ram")
    place = device_of(device)
    check_max_ram(device, max_ram)
    with progress.stage("download"):
        source = resolve(model, progress)
    from qtool.fitting.outside import kept_keys  # and torch: what can be told before is

    own = find(recipe) not in shipped().values()
    kept = frozenset() if isinstance(base, GgufRecipe) else kept_keys(base, own, sets)
    return FitRequest(
        source, base, settings, out, nbytes, bits, types, costs, threads, fresh, requantize,
        room, kept, place,
    )  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """The recipe that was written, and what it makes."""

    out: Path
    made: Made
    loss: float  # estimated, of what was chosen, in nats a token
    before: tuple[Made, float | None]  # the recipe as it was, and its loss, where known
    chosen: Mapping[str, Candidate]
    members: Mapping[str, int]  # tensors of each
    kept: Sequence[str]  # those that could not be measured: they are as the recipe has it
    kept_share: float  # of all bytes of tensors
    tokens: int
    unrelated: float | None  # how far apart predictions at unrelated places are, in nats
    memory: Memory
    seconds: float
    peak_rss_bytes: int
    notes: Sequence[str]

    def lines(self, command: Sequence[str]) -> list[str]:
        """For people: how many of each kind have which type, and what it comes to. command: what
        makes the artifact."""
        kinds: dict[str, Counter[str]] = {}
        for name, one in self.chosen.items():
            kind = _LAYER.sub(".*", name).removeprefix("blk.*.").removesuffix(".weight")
            kinds.setdefault(kind, Counter())[one.name] += 1
        width = max(map(len, kinds), default=0)
        said = [
            f"  {kind:<{width}}  " + ", ".join(_times(*one) for one in sorted(found.items()))
            for kind, found in kinds.items()
        ]
        if self.kept:
            named = ", ".join(self.kept[:3]) + (" ..." if len(self.kept) > 3 else "")
            said.append(
                f"warning: {len(self.kept)} could not be measured, {self.kept_share:.1%} of all "
                f"bytes, and are as the recipe has it: {named}"
            )
        old, loss = self.before
        was = (
            "" if loss is None else f"; the recipe as it was: {old.size_bytes:,} bytes, {loss:.4f}"
        )
        if self.unrelated is not None and max(self.loss, loss or 0.0) > _RELIED * self.unrelated:
            said.append(
                f"note: predictions at unrelated places are {self.unrelated:.3g} nats apart; what "
                f"is said of losses beyond {_RELIED * self.unrelated:.2g} is not to be relied on"
            )
        return [
            *said,
            f"{self.out}: {self.made.size_bytes:,} bytes, {self.made.bits_per_weight:.3f} bits per "
            f"weight; it loses about {self.loss:.4f} nats a token{was}",
            f"{self.seconds:.1f} s, peak memory {self.peak_rss_bytes / 2**20:.0f} MiB",
            f"next: {shlex.join(command)}",
        ]

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool fit`."""
        return {
            "recipe": str(self.out),
            "size_bytes": self.made.size_bytes,
            "bits_per_weight": self.made.bits_per_weight,
            "loss": self.loss,
            "before": {"size_bytes": self.before[0].size_bytes, "loss": self.before[1]},
            "tokens": self.tokens,
            "unrelated": self.unrelated,
            "memory": {
                "max_ram_bytes": self.memory.max_ram_bytes,
                "estimated_bytes": self.memory.estimated.nbytes,
                "threads": self.memory.setting.threads,
            },
            "chosen": [
                {"name": name, "tensors": self.members[name], "type": one.name,
                 "bytes": one.nbytes, "loss": one.loss}
                for name, one in self.chosen.items()
            ],
            "kept": list(self.kept),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
        }  # fmt: skip


def recorded(fitted: Fitted) -> dict[str, Any]:
    """What fitted_of() makes it of again, for JSON."""
    return {
        "made": asdict(fitted.made),
        "loss": fitted.loss,
        "before": [asdict(fitted.before[0]), fitted.before[1]],
        "chosen": {name: asdict(one) for name, one in fitted.chosen.items()},
        "members": dict(fitted.members),
        "kept": [*fitted.kept],
        "kept_share": fitted.kept_share,
        "tokens": fitted.tokens,
        "unrelated": fitted.unrelated,
        "notes": [*fitted.notes],
    }


def fitted_of(
    record: Mapping[str, Any], out: Path, memory: Memory, seconds: float, peak_rss_bytes: int
) -> Fitted:
    """Of an earlier run, told by this one."""
    from qtool.fitting.allocate import Candidate
    from qtool.fitting.ways import Made

    before, loss = record["before"]
    return Fitted(
        **{
            **record,
            "made": Made(**record["made"]),
            "before": (Made(**before), loss),
            "chosen": {name: Candidate(**one) for name, one in record["chosen"].items()},
        },
        out=out,
        memory=memory,
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes,
    )


def _times(choice: str, count: int) -> str:
    return f"{count} x {choice}{' bits' if choice.isdecimal() else ''}"
