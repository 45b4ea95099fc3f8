"""Rows of tensors that differ in their numbers: which are named, and which go without saying."""

from qtool.messages.numbered import numbers_at, parts_of, ranges


def rows(*groups: list[str]) -> list[str]:
    known = numbers_at(name for names in groups for name in names)
    return [ranges(parts_of(names[0]), names, known) for names in groups]


def up(*layers: int) -> list[str]:
    return [f"model.layers.{layer}.up.weight" for layer in layers]


def test_numbers_are_named_where_they_are_not_all() -> None:
    assert rows(up(0), up(1, 2, 3, 5), up(4), ["norm.weight"]) == [
        "model.layers.0.up.weight", "model.layers.{1-3,5}.up.weight", "model.layers.4.up.weight",
        "norm.weight",
    ]  # fmt: skip
    assert rows(up(0, 1, 2)) == ["model.layers.*.up.weight"]
    # All that have it are not all layers; a layer's experts are counted apart from layers.
    experts = [f"model.layers.{n}.experts.{e}.up.weight" for n in (1, 2) for e in (0, 1, 2)]
    assert rows(["model.layers.0.up.weight"], experts, ["model.layers.0.experts.7.up.weight"]) == [
        "model.layers.0.up.weight", "model.layers.{1-2}.experts.{0-2}.up.weight",
        "model.layers.0.experts.7.up.weight",
    ]  # fmt: skip
    assert ranges(parts_of("a.0.w"), ["a.0.w", "a.1.w"]) == "a.{0-1}.w"  # as plan says it


def test_stars_and_endless_numbers_of_strangers() -> None:
    long = f"a.{'9' * 5000}.w"
    assert rows([long], ["a.*.w"], ["a.1.w", "a.2.w"]) == [long, "a.*.w", "a.*.w"]
