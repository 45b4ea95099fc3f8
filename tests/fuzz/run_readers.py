"""Readers of what runs leave: statistics, and the journal of one that was stopped."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import lies
from promises import LONG, quietly

# Nothing of qtool is imported here: coverage is counted of what is imported later.


class Stats:
    """A file of statistics."""

    name = "stats"
    longest = LONG
    lie = staticmethod(partial(lies.contained, most=LONG - 20_000))
    beside = 0

    def __init__(self, folder: Path) -> None:
        import numpy as np
        from safetensors.numpy import save

        sites = {"a.q": ["a.q.weight", "a.k.weight"], "a.o": ["a.o.weight"], "a.e": ["a.e.weight"]}
        made: dict[str, Any] = {}
        for number, site in enumerate(sites):
            x = np.random.default_rng(number).normal(size=(16, 4)).astype(np.float32)
            made[f"site.{site}.count"] = np.array([16 if number < 2 else 0])
            if number < 2:
                made |= {f"site.{site}.gram": x.T @ x, f"site.{site}.square": (x * x).sum(0),
                         f"site.{site}.mean_abs": abs(x).mean(0),
                         f"site.{site}.max_abs": abs(x).max(0)}  # fmt: skip
        metadata = {"qtool.statistics": json.dumps(sites), "source": "x", "samples": "4"}
        self.made = save(made, metadata)
        self.path = folder / "stats.safetensors"
        self.names = [name for names in sites.values() for name in names]

    def seeds(self) -> list[bytes]:
        return [self.made]

    def attempt(self, data: bytes) -> None:
        import numpy as np

        from qtool.calibrating.stats import NEEDS
        from qtool.calibrating.stats_file import StatsFile

        self.path.write_bytes(data)
        file = StatsFile.open(self.path)
        refusals = 0
        for name in self.names:
            found = quietly(lambda n=name: file.read(n, NEEDS, 4))
            quietly(lambda n=name: file.read(n, ("gram",)))
            refusals += found is None
            if found is not None and found.count:
                assert found.gram.shape == (4, 4) and (np.diag(found.gram) >= 0).all()
                for one in (found.mean_abs, found.max_abs, found.square):
                    assert one.shape == (4,) and (one >= 0).all()
        if refusals:
            file.read("nothing", NEEDS)


class Journal:
    """The journal of a run, and the hidden states that it speaks of."""

    name = "journal"
    _CUT = b"\n\x1ehidden\x1e\n"

    def __init__(self, folder: Path) -> None:
        from types import SimpleNamespace

        import numpy as np
        import torch

        from qtool.formats.safetensors_file import StreamWriter, TensorSpec, plan_shards
        from qtool.messages.summary import ExpertReport, LayerReport
        from qtool.native.sums import checksum
        from qtool.provenance.outcome import Outcome
        from qtool.runs.resume import commit
        from qtool.workspaces.journal import Journal as Real

        self.folder = folder
        self.by_block: dict[int | None, list[Any]] = {
            block: [TensorSpec(f"{block}.{n}", "F32", (2, 2)) for n in "ab"]
            for block in (0, 1, None)
        }
        self.layout = plan_shards([spec for some in self.by_block.values() for spec in some], 10**9)
        (folder / "artifact").mkdir()
        self.stub = SimpleNamespace(
            plan=SimpleNamespace(
                by_block={b: [SimpleNamespace(outputs=some)] for b, some in self.by_block.items()}
            )
        )
        self.writer = StreamWriter(folder / "artifact", self.layout)
        for some in self.by_block.values():
            for number, spec in enumerate(some):
                self.writer.add(spec.name, np.full((2, 2), number + 1, np.float32))
        self.right = dict(self.writer.checksums)
        self.hidden = [torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 2, 3)]
        sums = [checksum(h.numpy().reshape(-1).view(np.uint8)) for h in self.hidden]
        kept = b"".join(h.numpy().tobytes() for h in self.hidden)
        journal = Real(folder / "made")
        for name, value in self._facts().items():
            journal.agree(name, value, "differs")
        layers = [LayerReport("0.a", "4 bits", 0.1, "weights")]
        experts = [ExpertReport("0.e", [1, 2])]
        for block in (None, 0, 1):
            sums_ = {spec.name: self.right[spec.name] for spec in self.by_block[block]}
            sink: Any = SimpleNamespace(checksums=lambda _, s=sums_: s, zeros=None)
            commit(journal, sink, block, Outcome(layers, ["note"], None, experts), sums)
        journal.close()
        lines = (folder / "made").read_bytes()
        # Without the last block, so that the hidden states are asked for.
        fewer = b"".join(lines.splitlines(keepends=True)[:-1])
        self.made = [one + self._CUT + kept for one in (fewer, lines)]
        self.beside = self.layout.size

    @staticmethod
    def _facts() -> dict[str, Any]:
        return {"version of qtool": "0", "recipe": {"name": "x", "bits": 4}, "source": [["a", 1]]}

    def lie(self, data: bytes, choose: Any) -> bytes:
        import zlib

        text, _, states = data.partition(self._CUT)
        kind = choose.randrange(6)
        lines = text.splitlines(keepends=True) or [b""]
        at = choose.randrange(len(lines))
        if kind == 0:
            text = lies.byte_lie(text, choose)
        elif kind == 1:
            states = lies.byte_lie(states, choose)
        elif kind == 2:
            lines.insert(choose.randrange(len(lines) + 1), choose.choice(lines))
            text = b"".join(lines)
        elif kind == 3:
            del lines[at]
            text = b"".join(lines)
        else:
            said = lies.json_lie(lines[at][9:].rstrip(b"\n"), choose).replace(b"\n", b" ")
            lines[at] = b"%08x %s\n" % (zlib.crc32(said), said)
            text = b"".join(lines)
        return text + self._CUT + states

    def seeds(self) -> list[bytes]:
        return self.made

    def attempt(self, data: bytes) -> None:
        from types import SimpleNamespace

        from qtool.runs import resume
        from qtool.runs.sink import Sink
        from qtool.streaming import hidden
        from qtool.streaming.workers import Workers
        from qtool.workspaces.journal import Journal as Real

        text, _, states = data.partition(self._CUT)
        path = self.folder / "journal"
        path.write_bytes(text)
        for file in ("hidden-0", "hidden-1"):
            (self.folder / file).write_bytes(states)
        self.writer.checksums.clear()
        sink: Any = SimpleNamespace(
            plan=self.stub.plan, writer=self.writer, folder=self.folder, zeros=None
        )
        sink.checksums = lambda block: Sink.checksums(sink, block)
        sink.restore = lambda block, sums: Sink.restore(sink, block, sums)
        sink.forget = lambda block: Sink.forget(sink, block)
        stream: Any = SimpleNamespace(hidden=[h.clone() * 0 for h in self.hidden])
        journal = Real(path)
        try:
            for name, value in self._facts().items():
                journal.agree(name, value, f"another {name}")
            with Workers(1) as workers:

                def found(index: int, kept: Any) -> bool:
                    return hidden.take_up(self.folder, index, kept, stream, workers)

                outside = resume.finished(journal, sink, None)
                done = resume.finished_blocks(journal, sink, 3, found)
            # What is believed is what the disk has.
            believed = [spec for b in range(len(done)) for spec in self.by_block[b]]
            believed += self.by_block[None] if outside is not None else []
            for spec in believed:
                assert self.writer.checksums[spec.name] == self.right[spec.name]
            if done and len(done) < 3:
                import torch

                pairs = zip(stream.hidden, self.hidden, strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
            # And the run goes on and says what it did.
            for one in [*done, *([outside] if outside else [])]:
                json.dumps([sum(e.tokens) for e in one.experts])
                sorted(layer.relative_error for layer in one.layers)
                "".join(one.notes)
            journal.commit("block 99", hidden=None)
        finally:
            journal.close()
        again = Real(path)
        again.close()
        assert "block 99" in again.done
