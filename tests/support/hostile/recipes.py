"""Recipes, and what `--set` says."""

from pathlib import Path

from support.hostile.row import Make, Row, entry, tensors

PLAIN = "format: awq\nmethod: rtn\nweights: {bits: 4, group_size: 128, symmetric: true}\n"


def recipe(text: str | bytes, *sets: str) -> Make:
    """`qtool plan` with this recipe, which is read before the model is."""

    def make(folder: Path) -> list[object]:
        path = folder / "r.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        (folder / "model.safetensors").write_bytes(tensors({"w": entry()}, bytes(8)))
        more = [word for item in sets for word in ("--set", item)]
        return ["plan", folder, "--recipe", path, *more]

    return make


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(8)
)

RECIPES = [
    Row("a bomb of aliases", recipe(BOMB), r"r\.yaml:1: anchors and aliases are not used"),
    Row("an object of Python", recipe("format: !!python/object/apply:os.system ['touch ran']\n"),
        "the tag .* is not used in recipes"),
    Row("a recipe without a bottom", recipe("a: " + "[" * 100), "nested more than 16 levels"),
    Row("mappings without a bottom", recipe("{a: " * 100), "nested more than 16 levels"),
    Row("a recipe of 80 KB", recipe("# x\n" * 20_000), "a recipe has at most 65536"),
    Row("a recipe of bytes", recipe(b"\xff\xfe\x00"), "not UTF-8 text"),
    Row("a recipe with NUL", recipe("format: awq\0"), "not YAML"),
    Row("a character beyond Unicode", recipe('format: "\\UFFFFFFFF"\n'),
        "an escape in quotes names no character"),
    Row("half a surrogate pair", recipe('format: "\\ud800"\n'), r"r\.yaml"),
    Row("two documents", recipe(PLAIN + "---\n" + PLAIN), "a second document starts here"),
    Row("a key twice", recipe(PLAIN + "format: awq\n"), "format: the key stands twice"),
    Row("a key that is a list", recipe("? [a, b]\n: 1\n"), "a key must be a word"),
    Row("an infinite number of bits", recipe(PLAIN.replace("bits: 4", "bits: 1e999")),
        r"weights\.bits|r\.yaml"),
    Row("a true number of bits", recipe(PLAIN.replace("bits: 4", "bits: true")), "weights.bits"),
    Row("a text of bits", recipe(PLAIN.replace("bits: 4", 'bits: "4"')), "weights.bits"),
    Row("a group of 10^30", recipe(PLAIN.replace("128", "1" + "0" * 30)), "weights.group_size"),
    Row("a key that paints", recipe(PLAIN + '"\\e[31mred": 1\n'), r"\\x1b\[31mred: unknown key"),
    Row("a merge key", recipe("<<: {a: 1}\n"), "<<: unknown key"),
    Row("a recipe that is a list", recipe("- format: awq\n"), "a recipe is a mapping"),
    Row("an empty recipe", recipe(""), "a recipe is a mapping"),
    Row("an item a thousand deep", recipe(PLAIN, ".".join(["a"] * 1000) + "=1"),
        "nested more than 16 levels"),
    Row("an item that is no text of YAML", recipe(PLAIN, 'weights.bits="\\U11111111"'),
        "names no character"),
]  # fmt: skip
