"""Gradients of the model's loss by what each block gives, over the first samples of a text, in
files.

    ends/
        journal     what is finished; while it is measured also what kept.py lists
        ends-N      gradients by what block N gives, a micro-batch after another, float32

The loss is that of measure.py: of tokens that are drawn from the model's own predictions, as it was
before anything of it is quantized. Micro-batches are those that the run's own stream begins with.
"""

import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from errno import EIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.cuda.device import Device
from qtool.errors import NoGradientError, QtoolError, SourceError, UnsupportedError
from qtool.gradients import measure as gradients
from qtool.gradients.kept import drop_passed
from qtool.gradients.passing import Passing
from qtool.messages.progress import Progress
from qtool.planning.shapes import whole_batches
from qtool.recipe.file import Precision
from qtool.streaming.finite import NotFiniteError
from qtool.streaming.skeleton import MICRO_BATCH_TOKENS, Skeleton
from qtool.streaming.workers import Workers
from qtool.workspaces.journal import Journal
from qtool.workspaces.workspace import Workspace

FOLDER = "ends"  # within a run's
_ALL = "gradients behind all blocks"
_NONE = "no gradients"


@dataclass(frozen=True)
class Ends:
    """Of one run."""

    space: Workspace
    samples: int  # over which they are
    missing: str = ""  # why there are none

    @classmethod
    def of(
        cls,
        samples: int,
        skeleton: Skeleton,
        tokens: NDArray[np.int64],
        seed: int,
        run: Workspace,
        threads: int,
        progress: Progress,
        device: Device | None,
        precision: Precision = "float32",
    ) -> "Ends":
        """Measured over the first samples of tokens [all samples, length], whole micro-batches of
        them, or found where an earlier run has left it.

        device: where blocks are passed, None: the CPU. precision: of matmuls. There are none
        where torch has no gradient, or one that is not finite; SourceError where logits are not.
        """
        folder = run.folder / FOLDER
        folder.mkdir(exist_ok=True)
        part = tokens[: whole_batches(samples, *tokens.shape) // tokens.shape[1]]
        found = cls._in(run, folder, len(part))
        if (entry := found.space.journal.done.get(_NONE)) is not None:
            found.space.journal.close()
            found._drop()
            return replace(found, missing=str(entry.get("why")))
        with Workers(threads) as workers:
            whole = found._is_whole(skeleton.count, workers)
        if not whole:
            found.space.journal.close()
            shutil.rmtree(folder)
            folder.mkdir()
            found = cls._in(run, folder, len(part))
        with closing(found.space.journal) as journal:
            if _ALL not in journal.done:
                if not run.journal.done:  # there is something to go on with from now on
                    run.journal.commit(FOLDER)
                progress.say(f"measuring gradients over {len(part)} samples (gptq.yaqa)")
                try:
                    gradients.measure(
                        skeleton, part, seed, found.space, threads, progress, found._keep,
                        MICRO_BATCH_TOKENS, device, precision,
                    )  # fmt: skip
                except NoGradientError as error:
                    found = replace(found, missing=str(error))
                    journal.commit(_NONE, why=found.missing)
                    found._drop()
                except NotFiniteError:
                    raise
                except (SourceError, UnsupportedError) as error:
                    raise advised(error) from error
                else:
                    journal.commit(_ALL)
                    drop_passed(found.space)
        return found

    def _drop(self) -> None:
        """Remove all but the journal, which says why there are none."""
        for path in self.space.folder.iterdir():
            if path.name != "journal":
                path.unlink()

    @classmethod
    def _in(cls, run: Workspace, folder: Path, samples: int) -> "Ends":
        journal = Journal(folder / "journal", run.journal.look)
        return cls(Workspace(run.out, folder, journal), samples)

    def _is_whole(self, count: int, workers: Workers) -> bool:
        """Whether all that an earlier run has kept of `count` blocks is there as it was written."""
        done = self.space.journal.done
        kept = [index for index in range(count) if _unit(index) in done]
        try:
            for index in kept:
                self.behind(index, workers)
        except (OSError, KeyError, TypeError):
            return False
        return len(kept) == count or _ALL not in done

    def _keep(self, index: int, gradients: Passing) -> None:
        """Those by what block `index` gives."""
        path = self._path(index)
        path.unlink(missing_ok=True)
        kept = Passing(path)
        for one in gradients:
            kept.append(one)
        shapes = [list(shape) for shape in kept.shapes]
        self.space.journal.commit(_unit(index), shapes=shapes, sums=kept.sums)

    def behind(self, index: int, workers: Workers) -> Passing:
        """Those by what block `index` gives, by micro-batch. OSError where they are not as they
        were written."""
        entry = self.space.journal.done[_unit(index)]
        found = Passing(self._path(index))
        found.of_shapes([torch.Size(shape) for shape in entry["shapes"]])
        if not found.take(found.path, entry["sums"], workers):
            raise OSError(EIO, "what was written reads otherwise", str(found.path))
        return found

    def _path(self, index: int) -> Path:
        return self.space.folder / f"ends-{index}"


def advised(error: QtoolError) -> QtoolError:
    """The same, with what to do."""
    return type(error)(f"{error}; --set gptq.yaqa=0 goes without gradients")


def _unit(index: int) -> str:
    return f"gradients behind block {index}"
