"""GPTQ into GGUF: codes chosen by the sweep, while the model is measured block by block.

    Gram matrix of an input -> its factor
    rows of each matrix that reads it -> blocks (qtool.quantizing.gguf.gptq.sweep)
                     -> the workspace, from where the file is written
                     -> dequantized, into the decoder block: later ones are fed by these
    (tuned: all matrices of the block, once they are swept, into the workspace again)

The head comes last, an embedding that is the head too: blocks are fed by the original one. Any
other embedding, and matrices whose types have no levels to choose among (ternary, plain floats),
are not swept: the writer encodes them later, and in decoder blocks the original feeds those after
it. Experts that hardly a token reached are encoded here, with their importance.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.blockwise.head import measured
from qtool.blockwise.originals import Originals, gptaq_note, tuned_note
from qtool.blockwise.row_feedback import FED_BACK, Feedback, Rows
from qtool.blockwise.row_feedback import told as fed_told
from qtool.calibrating.groups import groups_of
from qtool.calibrating.guidance import Guidance, told
from qtool.calibrating.pairs import is_compared
from qtool.calibrating.placed import Passage, placed_block
from qtool.calibrating.sites import BlockSites, Site
from qtool.calibrating.stats import MIN_EXPERT_TOKENS, SiteStats, Weights
from qtool.cuda.device import Device
from qtool.gguf.importance.measured import Squares
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.second_scales import with_scales
from qtool.gguf.source import GgufSource
from qtool.gguf_mixtures.kinds import layer_of
from qtool.gradients.block_gradients import Ends
from qtool.messages.progress import Progress
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some as shown
from qtool.messages.summary import TunedReport
from qtool.methods import gptq
from qtool.provenance.outcome import merged
from qtool.quantizing.gguf.gptq.swept_files import OUTSIDE, SweptFiles
from qtool.quantizing.gguf.gptq.swept_parts import beside, cost_by, is_in_order, parts_of
from qtool.quantizing.gguf.gptq.swept_site import Made, Part, fed_names, sweep_head, sweep_site
from qtool.quantizing.gguf.gptq.tuned_blocks import BlockMatrix, place_of
from qtool.recipe.file import Precision
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.methods import TuneOptions
from qtool.streaming.allocator import give_back
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import CPU, LoadedBlock
from qtool.workspaces.workspace import Workspace


@dataclass
class Sweeping:
    """The sweeps of a run, block by block."""

    options: gptq.Options
    files: SweptFiles
    gram_bytes: int
    tune: TuneOptions | None = None
    compensates: float = (
        0.0  # the part of what earlier blocks have lost that matrices compensate for
    )
    guidance: Guidance | None = None  # of tokens of keys and values
    samples: int = 0  # whose gradients say how rows compensate for each other
    seed: int = 0  # of those gradients
    feedback: Feedback | None = None  # rows compensate for each other; of measure_gradients()
    originals: Originals | None = None  # where blocks are to give back what they gave; of begin()
    kept: list[Mapping[str, Any]] = field(default_factory=list)  # by block, as the journal has it
    head_kept: Mapping[str, Any] | None = None  # the same of the head

    @classmethod
    def of(
        cls,
        recipe: GgufRecipe,
        tensors: Sequence[PlannedTensor],
        folder: Path,
        gram_bytes: int,
    ) -> "Sweeping":
        """Before the first block."""
        by_block: dict[int, list[PlannedTensor]] = defaultdict(list)
        for tensor in tensors:
            if tensor.swept:
                by_block[layer_of(tensor.name)].append(tensor)
        options = gptq.Options(**recipe.gptq.model_dump(exclude={"gptaq", "guided", "yaqa"}))
        tune = recipe.tune if recipe.tunes else None
        guidance = Guidance(recipe.guides, recipe.calibration.seed) if recipe.guides else None
        files = SweptFiles(folder, by_block)
        return cls(
            options, files, gram_bytes, tune, recipe.compensates, guidance,
            recipe.feeds_back, recipe.calibration.seed,
        )  # fmt: skip

    def measure_gradients(
        self,
        skeleton: Skeleton,
        tokens: NDArray[np.int64],
        space: Workspace,
        threads: int,
        progress: Progress,
        device: Device | None,
        precision: Precision,
    ) -> None:
        """Before all else, of the model as it is; tokens [samples, length]."""
        if self.samples:
            self.feedback = Feedback(
                Ends.of(
                    self.samples, skeleton, tokens, self.seed, space, threads, progress, device,
                    precision,
                )
            )  # fmt: skip

    def begin(self, skeleton: Skeleton, passage: Passage) -> None:
        """Before anything passes a block."""
        if self.tune is not None or self.compensates:
            self.originals = Originals.of(skeleton, passage, self.files.folder)

    @property
    def head(self) -> PlannedTensor | None:
        """Where it is to be swept."""
        return next(iter(self.files.tensors.get(OUTSIDE, ())), None)

    @property
    def awaits_head(self) -> bool:
        """Whether the head is still to be swept, behind the last block."""
        return self.head is not None and self.head_kept is None

    def take_names(self, source: GgufSource) -> None:
        """Tensors are made of those of the checkpoint that `source` says."""
        known = {tensor.name: tensor for tensor in with_scales(source).tensors}
        self.files.tensors = {
            index: [replace(tensor, source=known[tensor.name]) for tensor in tensors]
            for index, tensors in self.files.tensors.items()
        }

    def block(
        self,
        block: LoadedBlock,
        passage: Passage,
        found: BlockSites,
        seen: dict[str, SiteStats],
        weights: Weights,
    ) -> Iterator[tuple[Site, SiteStats]]:
        """Sweep the matrices of the next block, and put what the file will say into it; every site
        with its sum of squares, as it was before; with gptq.gptaq those of swept experts as it is
        once what all tokens meet is swept.

        seen: what was measured already of the inputs, by site id, and is used up. weights: of some
        inputs, by which their tokens count.
        """
        device, room, workers = passage.device, self.gram_bytes, passage.workers
        if device is not None:  # half of it: a factor lies beside what it is made of
            room = min(room, device.sums_bytes // 2)
        parts = parts_of(self.files, block.index, found)
        wanted = [site for site in found.sites if site.id in parts]
        if self.originals is not None and not self.compensates:
            self.originals.advance(block)
        if any(site.id not in seen for site in wanted):
            seen.clear()  # two sets of Gram matrices would be in memory
        rest = [site for site in found.sites if site.id not in parts]
        unseen = [site for site in rest if site.id not in seen]
        squares = seen | passage.collect(block, unseen, {"square"})
        yield from ((site, _without_gram(squares[site.id])) for site in rest)
        del squares
        file = self.files.path(block.index)
        file.write_bytes(b"")
        made: list[Made] = []
        notes = [] if self.guidance is None else self.guidance.said(block.index, bool(weights))
        rows: Rows = {}  # of the block before any of it is swept
        if self.feedback is not None:
            rows = self.feedback.of(block, passage, found, fed_names(parts))
        work = partial(
            sweep_site, options=self.options, block=block, file=file, workers=workers,
            device=device, moved=self.compensates > 0, rows=rows,
        )  # fmt: skip
        if self.compensates:
            compared = [site for site in wanted if is_compared(site)]
            wanted = [site for site in wanted if not is_compared(site)]
            unseen = [site for site in compared if site.id not in seen]
            known = {site.id: seen.pop(site.id) for site in compared if site.id in seen}
            known |= passage.collect(block, unseen, {"square"})
            known = {name: _without_gram(one) for name, one in known.items()}
            yield from ((site, known[site.id]) for site in compared)
            before = placed_block(block, CPU)
            for site in compared:
                own = weights.get(site.id)
                some, said = self._compensated(
                    site, parts[site.id], known, own, block, before, work
                )
                made += some
                notes += said
            self._originals.advance(before)
            del before
        for group in [wanted] if seen else groups_of(wanted, room):
            stats = seen or passage.collect(block, group, {"gram", "square"}, weights=weights)
            for site in group:
                Squares.of(site, stats[site.id])  # SourceError where it is not finite
                yield site, _without_gram(stats[site.id])
                stats[site.id] = _weighed(stats[site.id], site.id in weights)
            give_back()
            jobs = [(site, parts[site.id], stats) for site in sorted(group, key=cost_by(parts))]
            alone = partial(beside, device=device, threads=workers.threads)
            results = [work(job, each=workers.map) for job in jobs if not alone(job[0])]
            for some, said in results + workers.map(work, (j for j in jobs if alone(j[0]))):
                made += some
                notes += said
        give_back()
        if self.feedback is not None:
            said = self.feedback.said(block.index, FED_BACK in notes)
            notes = [*(note for note in notes if note != FED_BACK), *said]
        tuned = None
        if self.tune is not None:
            tuned = self._tune(self._originals, self.tune, block, made)
        kept = self.files.entry(block.index, made, notes)
        self.kept.append(kept if tuned is None else {**kept, "tuned": [tuned.before, tuned.after]})

    def _compensated(
        self,
        site: Site,
        parts: list[Part],
        known: dict[str, SiteStats],
        weights: Sequence[torch.Tensor] | None,
        block: LoadedBlock,
        before: LoadedBlock,
        work: Callable[..., tuple[list[Made], list[str]]],
    ) -> tuple[list[Made], list[str]]:
        """Sweep the matrices that read one site, once they compensate for what it has lost."""
        names = {name for part in parts for name in part.tensor.source.origin}
        found = self._originals.compensate(block, before, site, names, self.compensates, weights)
        seen = _weighed(found.added_to(known.pop(site.id)), weights is not None)
        each = self._originals.quantized.workers.map
        made, notes = work((site, parts, {site.id: seen}), each=each)
        return made, [*found.notes, *notes]

    @property
    def _originals(self) -> Originals:
        assert self.originals is not None
        return self.originals

    def _tune(
        self, originals: Originals, options: TuneOptions, block: LoadedBlock, made: list[Made]
    ) -> TunedReport | None:
        """Move the scales of what is in the file of a block, there and in the block; what was made
        then has other checksums. None where there is nothing to move."""
        files = self.files
        known = [t for t in files.tensors.get(block.index, ()) if t.name in files.places]
        places = [place for tensor in known if (place := place_of(tensor, block))]
        matrices: dict[str, BlockMatrix] = {}
        for place in places:
            tensor = place.tensor
            matrices |= place.parted(files.read(tensor, 0, tensor.source.rows))
        if not matrices:
            return None
        tuned = originals.tune(block, matrices, options)
        sums: dict[str, list[list[int]]] = {}
        with files.path(block.index).open("r+b") as file:
            for place in places:
                file.seek(files.places[place.tensor.name][1])
                file.write(place.joined(tuned.matrices).data)
        for place in places:
            sums[place.tensor.name] = files.sums(place.tensor)
        made[:] = [
            replace(one, sums=sums[one.name][one.matrix]) if one.name in sums else one
            for one in made
        ]
        return TunedReport(block.index, tuned.before, tuned.after)

    def sweep_head(self, skeleton: Skeleton, passage: Passage) -> None:
        """Sweep the head; passage: behind the last block."""
        head = self.head
        assert head is not None
        source, seen = head.source, None
        if len(source.origin) == 1 and is_in_order(source):
            seen = measured(skeleton, passage, source.origin[0], source.in_features)
        made: list[Made] = []
        notes: list[str] = []
        file = self.files.path(OUTSIDE)
        file.write_bytes(b"")
        if seen is not None:
            part, device = Part(head, 0, 0), passage.device
            one, notes = sweep_head(part, seen, self.options, file, passage.workers, device)
            made.append(one)
            self.files.places[head.name] = OUTSIDE, 0
        self.head_kept = self.files.entry(OUTSIDE, made, notes)

    def restore(self, kept: Any) -> bool:
        """Take up what was kept of the next block; False where it, or its file, is damaged."""
        good = self.files.is_whole(len(self.kept), kept)
        self.kept += [kept] if good else []
        return good

    def restore_head(self, kept: Any) -> bool:
        """The same of the head."""
        good = self.files.is_whole(OUTSIDE, kept)
        self.head_kept = kept if good else None
        return good

    def error(self, name: str) -> float | None:
        """sqrt(tr(E H E') / tr(W H W')) of a tensor, any of whose matrices was swept."""
        if name not in self.files.places:
            return None
        index = self.files.places[name][0]
        kept = self.head_kept if index == OUTSIDE else self.kept[index]
        assert kept is not None
        entry = kept["tensors"][name]
        signal, noise = entry["signal"], max(entry["noise"], 0.0)
        return float(np.sqrt(noise / signal)) if signal > 0 and entry["swept"] else None

    @property
    def notes(self) -> list[str]:
        """Sentences for the summary."""
        every_kept = [*self.kept, *([self.head_kept] if self.head_kept is not None else [])]
        entries = [entry for kept in every_kept for entry in kept["tensors"].values()]
        every = sum(len(entry["sums"]) for entry in entries)
        rare = every - sum(entry["swept"] for entry in entries)
        left = [name for kept in every_kept for name in kept["left"]]
        found = [note for kept in every_kept for note in kept["notes"]]
        said = merged(fed_told(told(found, len(self.kept)), len(self.kept)))
        said += gptaq_note(self.compensates)
        losses = enumerate(kept.get("tuned") for kept in self.kept)
        said += tuned_note([TunedReport(index, *both) for index, both in losses if both])
        if rare:
            said.append(
                f"{rare} of {every} matrices were not swept, as fewer than {MIN_EXPERT_TOKENS} "
                "tokens reached them; they are encoded with the importance that was measured"
            )
        if left:
            said.append(
                f"{counted(len(left), 'tensor')} not swept, as nothing was seen to read them, or "
                f"they have their columns in another order than the checkpoint: {shown(left)}"
            )
        return said


def _without_gram(stats: SiteStats) -> SiteStats:
    return replace(stats, gram=None, there=None)


def _weighed(stats: SiteStats, by_weights: bool) -> SiteStats:
    """Of tokens that count by weights the squares, too."""
    if not by_weights or stats.gram is None:
        return stats
    return replace(stats, square=np.ascontiguousarray(np.diagonal(stats.gram)))
