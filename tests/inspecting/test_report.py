"""`qtool report`: what the page says, that names cannot become markup, and what is refused."""

import json
import re
import shlex
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from qtool.errors import FormatError, SourceError
from qtool.hub import resolve
from qtool.messages.progress import Progress
from qtool.quality.evaluate import size_of
from qtool.quantizing import pipeline
from qtool.recipe.recipe import load
from qtool.report import figures as page_figures
from qtool.report import measured
from qtool.report.markup import element, text
from qtool.runs.request import Request
from qtool.scheme import Scheme
from support.formats.artifact_files import random_quant, write_folder
from support.inspecting.report_figures import figures
from support.quality.evaluating import artifacts, call
from support.runs import quantizing
from support.runs.quantizing import Call

__all__ = ["call"]

VOID = {"br", "col", "hr", "meta", "wbr"}
HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=y>\u202e\x1b[31m"


class Reader(HTMLParser):
    """Elements in the order they open, with attributes; the text; whether all is well nested."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.txt, tiny as AWQ, GPTQ and GGUF, and figures of them."""
    folder = artifacts(tmp_path_factory.mktemp("root"))
    rows = [figures(name, size_of(folder / name), 0.1 / (place + 1)) for place, name in enumerate(
        ("awq", "gptq", "q4.gguf"))]  # fmt: skip
    (folder / "figures.json").write_text(json.dumps({"against": "tiny", "artifacts": rows}))
    return folder


def reported(
    call: Call, out: Path, *arguments: object, status: int = 0
) -> tuple[str, dict[str, Any]]:
    """The page and the object."""
    said = call("report", *arguments, "-o", out, "--json")
    assert said.status == status, said.err
    return out.read_text(encoding="utf-8"), json.loads(said.out)


def three(root: Path) -> list[object]:
    return [root / name for name in ("awq", "gptq", "q4.gguf")]


def test_a_page_is_whole_and_needs_nothing(root: Path, call: Call, tmp_path: Path) -> None:
    html, found = reported(
        call, tmp_path / "r.html", *three(root), "--against", "tiny", "--eval",
        root / "figures.json",
    )  # fmt: skip
    page = Reader(html)
    tags = [tag for tag, _ in page.found]
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(tags)
    assert tags.count("svg") > 20 and "@import" not in html and "url(" not in html
    ids = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    for tag, attributes in page.found:
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        if "href" in attributes:
            assert tag == "a" and str(attributes["href"])[1:] in ids
        if tag == "svg":
            assert attributes.get("aria-hidden") or attributes["role"] == "img"
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in html
    for words in ("prefers-color-scheme: dark", "@media print", "--against tiny", "vllm serve",
                  "llama-server -m", "qtool quantize tiny --recipe w4g128-rtn"):  # fmt: skip
        assert words in html
    assert [one["label"] for one in found["artifacts"]] == ["awq", "gptq", "q4.gguf"]
    # Of those figures the GGUF file is the nearest; another is there as long as it is smaller.
    smallest = min(row["size_bytes"] for row in found["quality"])
    assert [row["size_bytes"] == smallest or row["artifact"] == "q4.gguf"
            for row in found["quality"]] == [row["front"] for row in found["quality"]]  # fmt: skip
    for row in found["quality"]:
        assert f"{row['kld']:.4f}" in page.text


def test_the_object_is_as_its_schema_says(root: Path, call: Call, tmp_path: Path) -> None:
    schema = json.loads(files("qtool").joinpath("schemas/report.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    _, found = reported(call, tmp_path / "r.html", *three(root), "--eval", root / "figures.json")
    jsonschema.validate(found, schema)
    del found["artifacts"][0]["codes"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema)


def test_the_same_inputs_give_the_same_bytes(
    root: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        pages.append(reported(call, Path("r.html"), *three(root), "--eval", root / "figures.json"))
    assert pages[0] == pages[1]


def test_figures_of_another_artifact_of_that_name(root: Path, call: Call, tmp_path: Path) -> None:
    """Sizes tell: what was measured last week in another folder is no figure of this one."""
    size = size_of(root / "awq")
    rows = [figures("runs/old/awq", size + 1, 0.1), figures("runs/new/awq", size, 0.2)]
    (tmp_path / "figures.json").write_text(json.dumps({"artifacts": rows}))
    html, found = reported(
        call, tmp_path / "r.html", root / "awq", "--eval", tmp_path / "figures.json"
    )
    kld = {row["artifact"]: row["kld"] for row in found["quality"]}
    assert kld == {f"awq ({size + 1:,} bytes)": 0.1, "awq": 0.2}
    said = f"it had {size + 1:,} bytes, and the one here has {size:,}"
    assert said in found["quality_from"] and said in Reader(html).text


def test_figures_of_no_artifact_of_the_page_are_said(
    root: Path, call: Call, tmp_path: Path
) -> None:
    rows = [figures("runs/other", 5, 0.1), figures("runs/other", 5, 0.1)]
    (tmp_path / "figures.json").write_text(json.dumps({"artifacts": rows}))
    html, found = reported(
        call, tmp_path / "r.html", root / "awq", "--eval", tmp_path / "figures.json"
    )
    said = "Figures of other are of no artifact that this page is about."
    assert said in found["quality_from"] and said in Reader(html).text


def test_an_interval_is_said_as_it_is() -> None:
    """Of few windows it is far from even on both sides: half of it says the wrong thing."""
    assert page_figures.with_spread(116.35, (52.7, 256.8), 2) == "116.35 (52.70 to 256.80)"
    assert page_figures.with_spread(3.0, None, 1) == "3.0"


def test_errors_that_the_artifact_records(root: Path, call: Call, tmp_path: Path) -> None:
    """Without the source the heat map is of what quantize found and wrote into qtool.json."""
    html, found = reported(call, tmp_path / "r.html", root / "awq")
    layers = found["artifacts"][0]["layers"]
    assert len(layers) == 28 and "records them: of each layer&#x27;s weights.<" in html
    _, compared = reported(call, tmp_path / "c.html", root / "awq", "--against", "tiny")
    exact = {one["name"]: one["relative_error"] for one in compared["artifacts"][0]["layers"]}
    for one in layers:
        assert one["relative_error"] == pytest.approx(exact[one["name"]], rel=1e-3)
    # Nobody wants to read a line for each in other places.
    card = (root / "awq" / "README.md").read_text()
    shown = call("inspect", root / "awq").out
    rows = found["artifacts"][0]["provenance"]
    assert '"layers"' not in card and "relative_error" not in shown
    assert not any("layers" in label for label, _ in rows)


def test_sizes_add_up(root: Path, call: Call, tmp_path: Path) -> None:
    _, found = reported(call, tmp_path / "r.html", *three(root), "--against", "tiny")
    source = found["reference"]
    for one in found["artifacts"]:
        total = sum(part["nbytes"] for part in one["components"])
        assert total == sum(row["nbytes"] for row in one["storage"])
        assert total < one["size_bytes"] < total + 200_000  # the headers, a GGUF's tokenizer
        assert one["bits_per_weight"] == pytest.approx(8 * total / one["parameters"])
        assert {part["name"] for part in one["components"]} >= {"embedding", "attention", "mlp"}
        assert one["parameters"] == source["parameters"]
        assert total < sum(part["nbytes"] for part in source["components"])
    assert source["path"] == "tiny"


def test_names_do_not_become_markup(call: Call, tmp_path: Path) -> None:
    """Of tensors, kinds, folders, provenance, configs, and rows of figures."""
    folder = tmp_path / HOSTILE.replace("/", "_").replace("\x1b", "")
    folder.mkdir()
    quants = {
        f"model.layers.0.{HOSTILE.replace('.', '')}": random_quant(Scheme(4, 32, False), 16, 64),
        "model.layers.1.self_attn.q_proj": random_quant(Scheme(4, 32, False), 16, 64),
    }
    write_folder(folder, "awq", quants, {f"{HOSTILE}!": np.ones((4, 16), np.float16)})
    named = [f"{name}.weight" for name in quants]
    record = {
        "qtool_version": HOSTILE,
        HOSTILE: HOSTILE,
        "recipe": {"name": HOSTILE, "method": "</style><script>"},
        "source": {"name": HOSTILE},
        "layers": [{"name": n, "scheme": HOSTILE, "relative_error": 0.5} for n in named],
    }
    (folder / "qtool.json").write_text(json.dumps(record))
    (tmp_path / "figures.json").write_text(
        json.dumps(
            figures(HOSTILE, 10, 0.1, protocol={"name": HOSTILE, "text": HOSTILE, "windows": 1,
                                                "length": 8})
        )
    )  # fmt: skip
    html, found = reported(call, tmp_path / "r.html", folder, "--eval", tmp_path / "figures.json")
    page = Reader(html)
    assert {tag for tag, _ in page.found} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "nav", "a", "b",
        "table", "thead", "tbody", "tr", "th", "td", "span", "div", "figure", "figcaption", "svg",
        "rect", "line", "circle", "text", "section", "details", "summary", "pre", "ul", "li",
        "footer", "wbr", "small",
    }  # fmt: skip
    assert "<script" not in html and "\u202e" not in html and "\x1b" not in html
    assert page.text.count("alert('1')") > 5  # it is there to be read
    assert "The artifact was" not in html and found["artifacts"][0]["layers"]
    assert found["artifacts"][0]["commands"] == []  # no recipe of that name


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert text("a<b>&\"'\u200f") == "a&lt;b&gt;&amp;&quot;&#x27;\\u200f"
    assert element("p", "<i>", element("b", "&"), title='"') == (
        '<p title="&quot;">&lt;i&gt;<b>&amp;</b></p>'
    )
    assert element("rect", x=0.5, y=1.0, stroke_width=2, fill=None) == (
        '<rect x="0.5" y="1" stroke-width="2"></rect>'
    )


def test_what_is_broken_is_in_the_page(root: Path, call: Call, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (root / "awq").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-1000])
    html, found = reported(
        call, tmp_path / "r.html", broken, root / "awq", "--text", root / "text.txt", "--windows",
        2, "--length", 32, status=1,
    )  # fmt: skip
    first, second = found["artifacts"]
    assert not first["ok"] and second["ok"] and first["parameters"] == 0
    assert first["size_bytes"] == len(whole) - 1000
    assert Reader(html).text.count(first["findings"][0]["message"]) == 1
    assert [row["artifact"] for row in found["quality"]] == ["awq"]
    assert "broken was not measured" in found["quality_from"]
    assert found["quality"][0]["kld"] is None and found["quality"][0]["perplexity"] > 1


def test_words_that_no_config_explains_are_no_dense_weights(
    root: Path, call: Call, tmp_path: Path
) -> None:
    """How many weights they hold nobody knows, nor how many bits each has."""
    lost = tmp_path / "lost"
    quantizing.quantize(resolve("tiny"), "w4a16-ct", lost)
    (lost / "qtool.json").unlink()
    config = json.loads((lost / "config.json").read_text())
    del config["quantization_config"]
    (lost / "config.json").write_text(json.dumps(config))
    html, found = reported(call, tmp_path / "r.html", lost, root / "awq", status=1)
    first, second = found["artifacts"]
    assert first["parameters"] == first["unquantized_share"] == first["bits_per_weight"] == 0
    assert second["parameters"] > 3e6 and second["unquantized_share"] > 0.1
    dense = [row for row in first["storage"] if row["scheme"].startswith("dense")]
    assert [row["scheme"] for row in dense] == ["dense BF16"]
    packed = {row["scheme"]: row["parameters"] for row in first["storage"] if row not in dense}
    assert packed == {"packed I32": 0, "packed F16": 0, "packed I64": 0}
    parts = {part["name"]: part["parameters"] for part in first["components"]}
    assert parts["mlp"] == 0 < parts["embedding"]
    assert sum(part["nbytes"] for part in first["components"]) > 1e6
    assert Reader(html).text.count("not known") >= 3
    assert not any(word in html for word in (">0.00 bits", " 0.00 bits per weight"))


def test_quality_is_that_of_eval(root: Path, call: Call, tmp_path: Path) -> None:
    windows = ["--text", root / "text.txt", "--windows", 2, "--length", 32]
    said = call("eval", root / "awq", "--against", "tiny", *windows, "--json")
    (tmp_path / "eval.json").write_text(said.out)
    _, now = reported(call, tmp_path / "a.html", root / "awq", "--against", "tiny", *windows)
    _, read = reported(
        call, tmp_path / "b.html", root / "awq", "--against", "tiny", "--eval",
        tmp_path / "eval.json",
    )  # fmt: skip
    assert now["quality"] == read["quality"] != []
    assert now["quality"][0]["kld"] == json.loads(said.out)["kld"]["mean"]


def test_a_sweep_from_files(root: Path, call: Call, tmp_path: Path) -> None:
    """Artifacts of one recipe and three sizes of groups, measured for the page."""
    made, model = [], quantizing.first_block_of_tiny(tmp_path / "model")
    for size in (32, 64, 128):
        recipe = load("w4g128-rtn", [f"weights.group_size={size}"])
        made.append(tmp_path / f"g{size}")
        request = Request("tiny", model, recipe, made[-1], None, 1, 1 << 30)
        pipeline.run(request, Progress(quiet=True))
    html, found = reported(
        call, tmp_path / "r.html", *reversed(made), "--against", model, "--text",
        root / "text.txt", "--windows", 2, "--length", 32,
    )  # fmt: skip
    assert found["sweep"]["key"] == "weights.group_size"
    values = [(value, name) for value, _, name in found["sweep"]["points"]]
    assert values == [(32, "g32"), (64, "g64"), (128, "g128")]
    assert "What weights.group_size does" in html
    command = (
        "qtool quantize tiny --recipe w4g128-rtn --set weights.group_size=64 "
        f"--max-shard-size {1 << 30} -o {made[1]}"
    )
    assert found["artifacts"][1]["commands"] == [command] and command in Reader(html).text


def test_the_command_of_a_file_that_was_quantized_twice(
    root: Path, call: Call, tmp_path: Path
) -> None:
    source, out = root / "q4.gguf", tmp_path / "again.gguf"
    done = call("quantize", source, "--recipe", "q2_k", "--requantize", "-o", out)
    assert done.status == 0, done.err
    _, found = reported(call, tmp_path / "r.html", out)
    (command,) = found["artifacts"][0]["commands"]
    _, _, first, *rest = shlex.split(command)
    again = call("quantize", source, *rest[:-1], tmp_path / "third.gguf")
    assert again.status == 0, again.err
    assert first and (tmp_path / "third.gguf").read_bytes() == out.read_bytes()


def test_what_fails_its_checks_ends_with_1_and_is_on_the_page(
    root: Path, call: Call, tmp_path: Path
) -> None:
    page = tmp_path / "r.html"
    (tmp_path / "empty").mkdir()
    said = call("report", root / "awq", tmp_path / "empty", "-o", page)
    assert said.status == 1 and "2 artifacts" in said.out
    assert f"error: {tmp_path / 'empty'}: does not pass its checks; {page} says which" in said.err
    assert "no *.safetensors file here" in page.read_text()
    said = call("report", tmp_path / "empty", "--json")
    assert said.status == 1 and "no *.safetensors file here" in said.out


def test_what_is_refused(root: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("mine")
    for status, *arguments in (
        (2, root / "awq"),
        (1, root / "awq", "-o", tmp_path / "r.html"),
        (1, tmp_path / "none", "-o", tmp_path / "new.html"),
        (2, root / "awq", root / "awq", "--json"),
        (2, root / "awq", "--windows", 3, "--json"),
        (1, root / "awq", "--eval", tmp_path / "none.json", "--json"),
    ):
        assert call("report", *arguments).status == status, arguments
    assert (tmp_path / "r.html").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize(
    "content",
    [
        {"artifacts": []},
        {"artifacts": "x"},
        {"artifacts": [[]]},
        figures("a", -1, 0.1),
        figures("a", 1, 0.1, perplexity="many"),
        figures("a", 1, 0.1, kld=3),
        figures("a", 1, 0.1, kld={"mean": True}),
        figures("a", 1, 0.1, perplexity_interval=[1]),
        figures("a", 1, 0.1, protocol=[]),
        {key: value for key, value in figures("a", 1, 0.1).items() if key != "tokens"},
    ],
)
def test_figures_that_are_none(content: Any, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(content))
    with pytest.raises((FormatError, SourceError), match=re.escape("f.json")):
        measured.read_figures([tmp_path / "f.json"], {})
