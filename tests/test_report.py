"""`qtool report`: what the page says, that names cannot become markup, and the drawings."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import quantizing
from artifact_files import random_quant, write_folder
from quantizing import Call

from qtool import native_gguf
from qtool.artifact import Artifact
from qtool.errors import FormatError, SourceError, UsageError
from qtool.formats.gguf_codes import CODES, block_scales, code_counts
from qtool.gguf.quantize import GgufRequest, run_gguf
from qtool.gguf_types import BY_NAME
from qtool.hub import tiny_folder
from qtool.quality.evaluate import size_of
from qtool.recipe.recipe import load
from qtool.report import figures as page_figures
from qtool.report import layers, measured, sample, svg
from qtool.report.facts import ArtifactFacts, Quality
from qtool.report.gather import unique_labels
from qtool.report.markup import element, text
from qtool.report.names import decoder_prefix, kind_order, place
from qtool.runs import pipeline
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.finding import LayerError

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
    """text.txt, and tiny as AWQ, GPTQ and GGUF."""
    folder = tmp_path_factory.mktemp("root")
    quantizing.text_file(folder / "text.txt")
    for recipe, name in (("w4g128-rtn", "awq"), ("w8-rtn", "gptq")):
        request = Request("tiny", tiny_folder(), load(recipe), folder / name, None, 1, 1 << 30)
        pipeline.run(request, Progress(quiet=True))
    gguf = GgufRequest("tiny", tiny_folder(), load("q4_k_m"), folder / "q4.gguf", 1)
    run_gguf(gguf, Progress(quiet=True))
    rows = [figures(name, size_of(folder / name), 0.1 / (place + 1)) for place, name in enumerate(
        ("awq", "gptq", "q4.gguf"))]  # fmt: skip
    (folder / "figures.json").write_text(json.dumps({"against": "tiny", "artifacts": rows}))
    return folder


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    return quantizing.caller(monkeypatch, capfd)


def figures(artifact: str, size: int, mean: float, **more: Any) -> dict[str, Any]:
    """What `qtool eval --json` says."""
    return {
        "artifact": artifact,
        "size_bytes": size,
        "perplexity": 20.0,
        "perplexity_interval": [19.0, 21.0],
        "reference_perplexity": 19.5,
        "kld": {"mean": mean, "median": mean, "p99": mean, "max": mean, "interval": [mean, mean]},
        "top1_agreement": 0.9,
        "rms_dp": 0.01,
        "acceptance": 0.95,
        "tokens": 96,
        "protocol": {"name": "plain", "text": "text.txt", "windows": 2, "length": 48},
        "failed": [],
    } | more


def reported(call: Call, out: Path, *arguments: object) -> tuple[str, dict[str, Any]]:
    """The page and the object."""
    said = call("report", *arguments, "-o", out, "--json")
    assert said.status == 0, said.err
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
        2, "--length", 32,
    )  # fmt: skip
    first, second = found["artifacts"]
    assert not first["ok"] and second["ok"] and first["parameters"] == 0
    assert first["size_bytes"] == len(whole) - 1000
    assert Reader(html).text.count(first["findings"][0]["message"]) == 1
    assert [row["artifact"] for row in found["quality"]] == ["awq"]
    assert "broken was not measured" in found["quality_from"]
    assert found["quality"][0]["kld"] is None and found["quality"][0]["perplexity"] > 1


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
    made = []
    for size in (32, 64, 128):
        recipe = load("w4g128-rtn", [f"weights.group_size={size}"])
        made.append(tmp_path / f"g{size}")
        request = Request("tiny", tiny_folder(), recipe, made[-1], None, 1, 1 << 30)
        pipeline.run(request, Progress(quiet=True))
    html, found = reported(
        call, tmp_path / "r.html", *reversed(made), "--against", "tiny", "--text",
        root / "text.txt", "--windows", 2, "--length", 32,
    )  # fmt: skip
    assert found["sweep"]["key"] == "weights.group_size"
    values = [(value, name) for value, _, name in found["sweep"]["points"]]
    assert values == [(32, "g32"), (64, "g64"), (128, "g128")]
    assert "What weights.group_size does" in html
    command = f"qtool quantize tiny --recipe w4g128-rtn --set weights.group_size=64 -o {made[1]}"
    assert found["artifacts"][1]["commands"] == [command] and command in Reader(html).text


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


def test_labels_are_told_apart() -> None:
    assert unique_labels(["a/x", "b/y"]) == ["x", "y"]
    assert unique_labels(["a/x", "b/x", "c/z"]) == ["a/x", "b/x", "z"]
    assert unique_labels(["/p/x", "x"]) == ["p/x", "x"]
    with pytest.raises(UsageError):
        unique_labels(["a/x", "a/x/"])


@pytest.mark.parametrize(
    ("name", "component", "kind", "block"),
    [
        ("model.embed_tokens.weight", "embedding", "embedding", None),
        ("token_embd.weight", "embedding", "embedding", None),
        ("lm_head.weight", "head", "head", None),
        ("output.weight", "head", "head", None),
        ("model.norm.weight", "norms", "norm", None),
        ("model.layers.7.self_attn.q_proj.weight", "attention", "q", 7),
        ("model.layers.7.self_attn.q_proj.bias", "attention", "q", 7),
        ("model.layers.7.self_attn.q_norm.weight", "norms", "q_norm", 7),
        ("model.layers.7.mlp.down_proj.weight", "mlp", "down", 7),
        ("model.layers.7.mlp.experts.12.up_proj.weight", "experts", "experts up", 7),
        ("model.layers.7.block_sparse_moe.experts.1.w2.weight", "experts", "experts down", 7),
        ("model.layers.7.mlp.shared_expert.up_proj.weight", "experts", "shared up", 7),
        ("model.layers.7.mlp.gate.weight", "other", "router", 7),
        ("model.layers.7.linear_attn.out_proj.weight", "attention", "o", 7),
        ("vision.blocks.3.attn.qkv.weight", "other", "qkv", None),
    ],
)
def test_places_of_names(name: str, component: str, kind: str, block: int | None) -> None:
    found = place(name, "model.layers")
    assert (found.component, found.kind, found.block) == (component, kind, block)


def test_the_decoder_is_what_holds_most() -> None:
    sizes = [("blk.0.attn_q.weight", 5), ("blk.1.attn_q.weight", 5), ("v.blk.0.x.weight", 9)]
    assert decoder_prefix(sizes) == "blk" and decoder_prefix([("a", 1)]) is None
    assert place("blk.1.ffn_down_exps.weight", "blk").kind == "experts down"
    order = ["q", "k", "v", "o", "gate", "up", "down", "strange", "shared up", "experts gate"]
    assert sorted(reversed(order), key=kind_order) == order


def unit_blocks(name: str, count: int) -> np.ndarray:
    """Random blocks whose scales are one and whose minima are zero."""
    block = BY_NAME[name]
    raw = np.random.default_rng(1).integers(0, 256, (count, block.nbytes), dtype=np.uint8)
    one = np.array([0, 0x3C], np.uint8)  # in half precision
    if (at := CODES[name].scale) is not None:
        raw[:, at : at + 2] = one
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        raw[:, 2:4] = 0
    if name in ("Q4_K", "Q5_K"):
        raw[:, 4:16] = np.repeat([1, 0, 1], 4)
    if name == "Q2_K":
        raw[:, :16], raw[:, 82:84] = 1, 0
    if name == "Q3_K":
        raw[:, 96:104], raw[:, 104:108] = 0x11, 0xAA
    if name == "Q6_K":
        raw[:, 192:208] = 1
    if name == "IQ4_XS":
        raw[:, 2:4], raw[:, 4:8] = 0xAA, 0x11
    if name == "MXFP4":
        raw[:, 0] = 128
    if name == "NVFP4":
        raw[:, :4] = 0x38
    return raw


@pytest.mark.parametrize("name", CODES)
def test_codes_of_gguf_blocks(name: str) -> None:
    """As many of each code, in order, as there are of each weight that the kernels decode."""
    raw = unit_blocks(name, 200)
    weights = native_gguf.dequantize(raw, BY_NAME[name], BY_NAME[name].weights)
    values, expected = np.unique(weights, return_counts=True)
    counts = list(code_counts(raw, name))
    if CODES[name].order is not None:  # zero has two codes
        counts[7:9] = [counts[7] + counts[8]]
    assert counts == list(expected) and sum(counts) == weights.size
    if name[0] == "Q" and name != "Q1_0":
        assert values[0] == CODES[name].first
    scales = block_scales(raw, name)
    assert scales is None if CODES[name].scale is None else (scales == 1).all()


def test_codes_and_scales_of_a_sample(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(9)]
    quants = {name: random_quant(Scheme(4, 32, False), 16, 64, i) for i, name in enumerate(names)}
    quants[names[8]].scale[0, 0] = 0
    write_folder(tmp_path, "awq", quants)
    kinds = {f"{name}.weight": "q" for name in names}
    found = sample.of_artifact(Artifact.open(tmp_path), kinds)
    looked = [quants[names[i]] for i in (0, 3, 5, 8)]
    (codes,), (scales,) = found.codes, found.scales
    assert (codes.kind, codes.sampled, codes.matrices, codes.first) == ("q", 4, 9, 0)
    expected = sum(np.bincount(q.codes.reshape(-1), minlength=16) for q in looked)
    assert codes.counts == tuple(expected)
    values = np.concatenate([q.scale.reshape(-1) for q in looked]).astype(np.float32)
    assert scales.broken == 1 and scales.count == values.size
    good = values[values > 0]
    assert (scales.low, scales.high) == (good.min(), good.max())
    assert scales.median == np.median(good)
    assert sample.entropy(codes) == pytest.approx(4, abs=0.02)


def test_codes_of_small_floats_are_in_the_order_of_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = np.array([[0, 1, 7, 8, 15, 15]], np.uint8)
    scheme = Scheme(4, 32, True, book="e2m1")
    one = GroupQuant(scheme, codes, np.ones((1, 1), np.float32), np.zeros((1, 1), np.uint8))

    class Holder:
        def read(self, name: str) -> GroupQuant:
            return one

    looked = sample._matrix(Holder(), "x")  # type: ignore[arg-type]
    found = sample.Codes("q", "x", 1, 1, tuple(looked.counts), looked.first, looked.book)
    assert [(n, c) for n, c in sample.binned(found) if c] == [
        ("-6", 2), ("-0", 1), ("0", 1), ("0.5", 1), ("6", 1)
    ]  # fmt: skip


def test_at_most_64_bars() -> None:
    codes = sample.Codes("q", "Q8_0", 1, 1, tuple(range(256)), -128, "int")
    bars = sample.binned(codes)
    assert len(bars) == 64 and bars[0] == ("-128 to -125", 6) and bars[-1][0] == "124 to 127"
    assert sum(count for _, count in bars) == codes.total
    halves = sample.Codes("q", "fp8", 1, 1, (1,) * 256, 0, "e4m3")
    bars = sample.binned(halves)
    assert bars[0] == ("-448 to -384", 4) and bars[-1] == ("384 to 448", 4)
    assert sample.ends(halves) == ("-448", "448")
    assert sample.spread(list("abcdefg"), 4) == ["a", "c", "e", "g"]


def errors_of(blocks: int) -> list[LayerError]:
    return [
        LayerError(f"model.layers.{b}.self_attn.{k}_proj.weight", "w4", 0.01 * b + 0.001 * n, None)
        for b in range(blocks)
        for n, k in enumerate("qk")
    ]


def test_a_heat_map_has_a_cell_for_each_layer() -> None:
    grid = layers.grid(errors_of(12)[1:])  # without q of block 0
    assert list(grid.kinds) == ["q", "k"] and grid.blocks == 12
    assert sorted(block for block in grid.kinds["q"] if block is not None) == list(range(1, 12))
    low, high = layers.scale_of(errors_of(12))
    assert (low, high) == (0, 0.111)
    levels = [svg.level(error.relative_error, low, high) for error in errors_of(12)]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == svg.LEVELS - 1
    # Errors that hardly differ are not told apart by extremes of colour.
    even = [LayerError(f"model.layers.{i}.a.weight", "w4", 0.1 + 1e-4 * i, None) for i in range(9)]
    assert {svg.level(e.relative_error, *layers.scale_of(even)) for e in even} == {4}


def quality(artifact: str, size: int, mean: float, **more: Any) -> Quality:
    return measured.quality_of(artifact, figures(artifact, size, mean, **more), {})


def test_the_front_is_of_what_was_measured_alike() -> None:
    other = {"name": "plain", "text": "other.txt", "windows": 2, "length": 48}
    rows = [
        quality("a", 10, 0.3), quality("b", 20, 0.1), quality("c", 20, 0.2),
        quality("d", 5, 0.01, protocol=other), quality("e", 1, 0.1, kld=None),
    ]  # fmt: skip
    assert [row.front for row in measured.with_front(rows)] == [True, True, False, True, False]


def with_recipe(label: str, **recipe: Any) -> ArtifactFacts:
    empty: dict[str, Any] = dict.fromkeys(ArtifactFacts.__dataclass_fields__, ())
    return ArtifactFacts(**empty | {"label": label, "recipe": {"name": label, **recipe}})


def test_a_sweep_is_of_one_number() -> None:
    names = ("a", "b", "c")
    rows = [quality(name, 10, kld) for name, kld in zip(names, (0.3, 0.1, 0.2), strict=True)]
    swept = [
        with_recipe(n, smooth={"alpha": a}) for n, a in zip(names, (0.9, 0.5, 0.1), strict=True)
    ]
    found = measured.find_sweep(swept, rows)
    assert found is not None and found.key == "smooth.alpha"
    assert found.points == ((0.1, 0.2, "c"), (0.5, 0.1, "b"), (0.9, 0.3, "a"))
    assert measured.find_sweep(swept[:2], rows) is None
    two = [
        with_recipe(n, alpha=a, bits=b) for n, a, b in zip(names, (1, 2, 3), (4, 4, 8), strict=True)
    ]
    assert measured.find_sweep(two, rows) is None
    words = [with_recipe(n, method=n) for n in names]
    assert measured.find_sweep(words, rows) is None
