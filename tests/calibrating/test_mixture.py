"""Several texts to calibrate on, in the shares that a YAML file says."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError
from qtool.hub import tiny_folder
from qtool.matrix.shared import text_digest
from qtool.messages.progress import Progress
from qtool.planning.shapes import text_bytes
from qtool.recipe.recipe import Calibration
from qtool.texts import calibration
from qtool.texts.calibration import calibration_tokens
from qtool.texts.mixture import Mixture, Part, check_source, mixture
from qtool.texts.source import TOPICS

WORDS = {
    "sea.txt": "the sea is wide and the ships are few; ",
    "law.txt": "whereas the party of the first part agrees to pay; ",
    "code.md": "for i in range(10): print(i ** 2)\n",
}


@dataclass(frozen=True)
class Settings:
    source: str | None
    samples: int = 7
    length: int = 16
    seed: int = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts, and a YAML file of them that is read from elsewhere."""
    own = tmp_path / "texts"
    own.mkdir()
    for number, (name, words) in enumerate(WORDS.items()):
        (own / name).write_text("".join(f"{n} {words}" for n in range(100 + 10 * number)))
    (own / "mix.yaml").write_text("- sea.txt\n- source: law.txt\n  share: 4\n- code.md\n")
    return own


def ids(path: Path, samples: int) -> list[list[int]]:
    return calibration_tokens(Settings(str(path), samples), tiny_folder()).tokens.tolist()


def test_samples_are_those_of_each_text_alone_and_alternate(folder: Path) -> None:
    found = calibration_tokens(Settings(str(folder / "mix.yaml"), 6), tiny_folder())
    sea, law, code = (ids(folder / name, n) for name, n in zip(WORDS, (1, 4, 1), strict=True))
    assert found.tokens.tolist() == [law[0], law[1], sea[0], code[0], law[2], law[3]]
    assert found.tokens.dtype == np.int64 and found.source == "file"


def test_a_text_alone_is_that_text(folder: Path) -> None:
    (folder / "one.yml").write_text("[law.txt]")
    assert ids(folder / "one.yml", 5) == ids(folder / "law.txt", 5)


@pytest.mark.parametrize(
    ("shares", "samples", "counts"),
    [
        ((1, 1, 1), 8, [3, 3, 2]),
        ((1, 1, 1), 3, [1, 1, 1]),
        ((0.5, 0.25, 0.25), 128, [64, 32, 32]),
        ((1, 2), 16, [5, 11]),
        ((0.1, 0.2, 0.7), 10, [1, 2, 7]),
        ((1.5e308, 1.5e308), 10, [5, 5]),
    ],
)
def test_how_many_of_each(shares: tuple[float, ...], samples: int, counts: list[int]) -> None:
    parts = tuple(Part(f"{number}.txt", share) for number, share in enumerate(shares))
    assert Mixture("mix.yaml", parts).counts(samples) == counts


def test_a_text_without_a_sample_is_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"2 samples are too few for 3 texts .*code\.md; ask"):
        ids(folder / "mix.yaml", 2)


def test_ids_of_short_texts_are_kept_within_bounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[Any, Any] = {}
    asked: list[str] = []
    real = calibration.tokenize
    monkeypatch.setattr(calibration, "_KEPT", kept)
    monkeypatch.setattr(
        calibration, "tokenize", lambda text, model: (asked.append(text), real(text, model))[1]
    )
    first = ids(folder / "mix.yaml", 6)
    assert ids(folder / "mix.yaml", 6) == first and len(asked) == len(kept) == 3
    most = sum(one.nbytes for one in kept.values()) - 1
    monkeypatch.setattr(calibration, "_MOST_KEPT", most)
    (folder / "sea.txt").write_text("words of another kind, " * 300)
    assert ids(folder / "mix.yaml", 6) != first and len(asked) == 4 + 2
    assert sum(one.nbytes for one in kept.values()) <= most


def test_the_text_that_is_too_short_is_named(folder: Path) -> None:
    (folder / "law.txt").write_text("a few words")
    with pytest.raises(SourceError, match=r"texts/law.txt\) has \d+ tokens, enough for 0 samples"):
        ids(folder / "mix.yaml", 6)


def test_where_names_lead(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "all.yaml").write_text(f"- sea.txt\n- ann/texts:train.jsonl\n- {TOPICS}\n")
    found = [part.source for part in mixture(str(folder / "all.yaml")).parts]
    assert found == [str(folder / "sea.txt"), "ann/texts:train.jsonl", TOPICS]
    monkeypatch.chdir(folder)
    assert mixture("all.yaml").parts[0].source == "sea.txt"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", ["mix.yaml: expected is a list of texts"]),
        ("texts: [sea.txt]", ["mix.yaml: expected is a list of texts"]),
        ("[]", ["mix.yaml: expected is a list of texts"]),
        ("- sea.txt\n- 5", ["mix.yaml:2: expected is a list of texts"]),
        ("- {source: sea.txt, weight: 2}", ["mix.yaml:1: weight: unknown key; expected is"]),
        ("- {share: 2}", ["mix.yaml:1: expected is a list of texts"]),
        ("- {source: sea.txt, shares: 2}", ["mix.yaml:1: shares: unknown key; expected is a list"]),
        ("- 3", ["mix.yaml:1: expected is a list of texts"]),
        ("- {source: sea.txt, share: 0}", ["mix.yaml:1: share: 0 is no number above 0"]),
        ("- {source: sea.txt, share: -1}", ["mix.yaml:1: share: -1 is no number above 0"]),
        ("- {source: sea.txt, share: much}", ["mix.yaml:1: share: 'much' is no number above 0"]),
        ("- {source: sea.txt, share: true}", ["mix.yaml:1: share: True is no number above 0"]),
        ("- {source: sea.txt, share: 1e9999}", ["mix.yaml:1: share: inf is no number above 0"]),
        ("- {source: 7}", ["mix.yaml:1: source: 7 is no name"]),
        ("- sea.txt\n- other.yaml", ["mix.yaml:2: other.yaml: a mixture within a mixture"]),
        ("- sea.txt\n- lost.txt", ["mix.yaml:2: ", "texts/lost.txt: no such file"]),
        ("- sea.txt\n- ./sea.txt", ["mix.yaml:2: ", "sea.txt is named twice"]),
        ("- ann/a:b.txt\n- ann/a:b.txt", ["mix.yaml:2: ann/a:b.txt is named twice"]),
        ("- " + "words and more " * 30, ["mix.yaml:1: source: 'words", "is no name"]),
        ("- [sea.txt", ["mix.yaml:", "not YAML", "expected is a list of texts"]),
        ("- &a sea.txt\n- *a", ["mix.yaml:1: anchors and aliases"]),
    ],
)
def test_refused(said: str, words: list[str], folder: Path) -> None:
    (folder / "mix.yaml").write_text(said)
    for ask in (check_source, lambda source: calibration_tokens(Settings(source), tiny_folder())):
        with pytest.raises(SourceError) as error:
            ask(str(folder / "mix.yaml"))
        assert all(word in str(error.value) for word in words), error.value


def test_a_text_of_no_use_is_named_with_its_list(folder: Path) -> None:
    (folder / "bad.jsonl").write_text("no JSON")
    (folder / "mix.yaml").write_text("- sea.txt\n- bad.jsonl\n")
    with pytest.raises(SourceError, match=r"mix\.yaml: .*bad\.jsonl:1: not JSON"):
        check_source(str(folder / "mix.yaml"))
    with pytest.raises(SourceError, match=r"^[^:]*bad\.jsonl:1: not JSON"):
        check_source(str(folder / "bad.jsonl"))


def test_plans_count_the_longest(folder: Path) -> None:
    sizes = [(folder / name).stat().st_size for name in WORDS]
    of = Calibration(source=str(folder / "mix.yaml"))
    assert text_bytes(of) == max(sizes) > min(sizes)
    (folder / "mix.yaml").write_text("- nothing.txt")  # is said where a text is wanted
    assert text_bytes(of) == 0
    said = CliRunner().invoke(
        app, ["plan", "tiny", "--recipe", "w4g128-awq",
              "--set", f"calibration.source={folder / 'mix.yaml'}"],
    )  # fmt: skip
    assert said.exit_code == 0 and "nothing.txt: no such file" in " ".join(said.stdout.split())


def test_plans_count_what_is_read_of_a_text(tmp_path: Path) -> None:
    for name, nbytes, counted in (
        ("short.txt", 1000, 1000),
        ("long.txt", 100 << 20, 2 << 24),
        ("packed.jsonl.gz", 1000, 8000),
        ("table.parquet", 100 << 20, 2 << 24),
    ):
        path = tmp_path / name
        path.touch()
        os.truncate(path, nbytes)
        assert text_bytes(Calibration(source=str(path))) == counted
    many = Calibration(source=str(tmp_path / "long.txt"), samples=1024, length=512)
    assert text_bytes(many) == 2 * 64 * 1024 * 512
    assert text_bytes(Calibration(source="ann/texts")) == 0


def test_digests_of_gguf_sources_hang_on_texts_and_shares(folder: Path) -> None:
    source, mix = Path("model.gguf"), folder / "mix.yaml"

    def digest() -> str:
        settings = Calibration(source=str(mix), samples=12)
        return text_digest(settings, source, Progress())

    first = digest()
    assert digest() == first
    mix.write_text("- sea.txt\n- source: law.txt\n  share: 3\n- code.md\n")
    second = digest()
    (folder / "code.md").write_text("while True: pass\n" * 100)
    assert len({first, second, digest()}) == 3


def test_a_run_and_the_same_again(folder: Path, tmp_path: Path) -> None:
    def command(*words: str) -> str:
        said = CliRunner().invoke(app, [*words])
        assert said.exit_code == 0, said.output
        return said.stdout

    out, mix = str(tmp_path / "out"), str(folder / "mix.yaml")
    asked = ["--calibration", mix, "--samples", "6", "--length", "16"]
    command("quantize", "tiny", "--recipe", "w4g128-gptq", *asked, "-o", out)
    record = json.loads(command("inspect", out, "--json"))["provenance"]["calibration"]
    settings = Settings(mix, 6, seed=record["seed"])
    expected = calibration_tokens(settings, tiny_folder()).digest
    assert (record["source"], record["digest"]) == ("file", f"sha256:{expected}")
    assert "the same" in command("reproduce", out, "--model", "tiny", "--calibration", mix)
    failed = CliRunner().invoke(
        app, ["reproduce", out, "--model", "tiny", "--calibration", str(folder / "law.txt")]
    )
    assert failed.exit_code == 1
    assert "--calibration names a wrong one" in str(failed.exception)
