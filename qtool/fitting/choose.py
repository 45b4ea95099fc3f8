"""The cheapest choice that keeps a size, and the recipe that says it.

The knapsack counts tensors alone. What a file has beside them grows with what the recipe says of
them, so that a choice may come out too large by a little: then it is made again with so much less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from qtool.errors import UnsupportedError
from qtool.fitting.allocate import Candidate, allocate
from qtool.fitting.costs import Costs
from qtool.fitting.request import FitRequest
from qtool.fitting.ways import Made, Ways

_TRIES = 4
_SMALLEST = {"2", "IQ1_S"}  # there is nothing below that would be worth it


@dataclass(frozen=True)
class Chosen:
    """What the recipe says, and what it makes."""

    text: str  # of the recipe
    made: Made
    loss: float  # estimated, in nats a token
    chosen: Mapping[str, Candidate]  # by unit
    left: Mapping[str, int]  # bytes of the units that could not be measured
    notes: Sequence[str]

    @property
    def left_share(self) -> float:
        """Of all bytes of tensors, those of what could not be measured."""
        return sum(self.left.values()) / max(1, self.made.tensor_bytes)


def choose(request: FitRequest, ways: Ways, costs: Costs) -> Chosen:
    """UnsupportedError where nothing is small enough."""
    units = {
        name: _candidates(request, name, sizes, losses, ways.remains.get(name, 1.0))
        for name, sizes in ways.sizes.items()
        if (losses := costs.losses.get(name))
    }
    nbytes_before = {name: nbytes for name, (_, nbytes) in ways.chosen_before.items()}
    left = {name: nbytes for name, nbytes in nbytes_before.items() if name not in units}
    free = sum(nbytes_before.values()) - sum(left.values())
    fixed = ways.before.tensor_bytes - free  # bytes that nothing is chosen for
    room = _budget(request, ways.before) - fixed
    for _ in range(_TRIES):
        found = allocate(list(units.values()), room)
        if found is None:
            break
        said = _said(request, ways, costs, units, left, found)
        over = 0 if request.size_bytes is None else said.made.size_bytes - request.size_bytes
        if over <= 0:
            return said
        room = sum(one.nbytes for one in found) - over
    # Beside its tensors it may have less than what was begun with: then there is room for it.
    smallest = [min(unit, key=lambda one: one.nbytes) for unit in units.values()]
    said = _said(request, ways, costs, units, left, smallest)
    _refuse_less_than(request, said.made, fixed, ways)
    return said


def _said(
    request: FitRequest,
    ways: Ways,
    costs: Costs,
    units: Mapping[str, Sequence[Candidate]],
    left: Mapping[str, int],
    taken: Sequence[Candidate],
) -> Chosen:
    """What is made of a choice, one candidate for each of `units`."""
    chosen = dict(zip(units, taken, strict=True))
    loss = costs.together(one.loss for one in chosen.values())
    text = ways.text(_about(request, loss), _names(chosen))
    made = ways.made(text)
    return Chosen(text, made, loss, chosen, left, _beyond(request, units, chosen, made))


def check_size(request: FitRequest, ways: Ways) -> None:
    """UnsupportedError, before any work, where no choice is small enough; and what is refused of
    the recipes that may come out, which are the shortest and the longest of these."""
    if not ways.sizes:
        raise UnsupportedError(
            f"{request.source}: recipe {request.recipe.name} leaves nothing to be chosen; its "
            "overrides name every matrix; begin with the one that it was made from"
        )
    ends = [
        {name: pick(sizes, key=sizes.__getitem__) for name, sizes in ways.sizes.items()}
        for pick in (max, min)
    ]
    for choices in ends:
        made = ways.made(ways.text(_about(request, 0.0), choices))
    least = sum(ways.sizes[name][choice] for name, choice in choices.items())
    _refuse_less_than(request, made, made.tensor_bytes - least, ways)


def loss_before(ways: Ways, costs: Costs) -> float | None:
    """Of the recipe as it was; None where it has types that were not measured."""
    found = []
    for name, (choice, _) in ways.chosen_before.items():
        if losses := costs.losses.get(name):
            loss = losses.get(choice)
            if loss is None:
                return None
            found.append(ways.remains.get(name, 1.0) * loss)
    return costs.together(found)


def _budget(request: FitRequest, made: Made) -> int:
    """Bytes of tensors that an artifact may have which is like this one otherwise."""
    if request.size_bytes is not None:
        return request.size_bytes - (made.size_bytes - made.tensor_bytes)
    assert request.bits is not None
    return int(request.bits * made.numbers / 8)


def _refuse_less_than(request: FitRequest, made: Made, fixed: int, ways: Ways) -> None:
    """UnsupportedError where less is asked for than the smallest artifact has, of which `fixed` are
    of tensors that nothing is chosen for."""
    budget = _budget(request, made)
    if budget >= made.tensor_bytes:
        return
    size = request.size_bytes
    asked = f"--bits: {request.bits:g} bits" if size is None else f"--size: {size:,} bytes"
    there = {choice for sizes in ways.sizes.values() for choice in sizes}
    smaller = "" if budget < fixed or there & _SMALLEST else ", or name smaller --types"
    keys = ", ".join(f"mlx.{key}" for key in sorted(request.kept_keys))
    given = f" (with {keys} as given)" if keys else ""
    bits = ceil(1000 * made.bits_per_weight) / 1000  # so that as many are enough
    raise UnsupportedError(
        f"{asked} are asked for, and with these types the smallest artifact has "
        f"{made.size_bytes:,} bytes, {bits:.3f} bits a weight, {fixed:,} bytes of it in tensors "
        f"that are not chosen for{given}; ask for more{smaller}"
    )


def _candidates(
    request: FitRequest,
    name: str,
    sizes: Mapping[str, int],
    losses: Mapping[str, float | None],
    remains: float,
) -> list[Candidate]:
    """The choices of a unit. remains: of what rounding to nearest loses."""
    found = [
        Candidate(choice, nbytes, remains * loss)
        for choice, nbytes in sizes.items()
        if (loss := losses.get(choice)) is not None
    ]
    if not found:
        raise UnsupportedError(
            f"{request.source}: {name} has weights that none of --types can hold; add one such as "
            "q8_0, or give it a type by an override"
        )
    return found


def _beyond(
    request: FitRequest,
    units: Mapping[str, Sequence[Candidate]],
    chosen: Mapping[str, Candidate],
    made: Made,
) -> list[str]:
    """A sentence where more bytes were asked for than all types together have use for."""
    largest = {name: max(one.nbytes for one in unit) for name, unit in units.items()}
    if any(one.nbytes < largest[name] for name, one in chosen.items()):
        return []
    if _budget(request, made) <= made.tensor_bytes:
        return []
    return [
        "every matrix has the largest type that there is to choose, which comes to "
        f"{made.size_bytes:,} bytes, {made.bits_per_weight:.3f} bits a weight; more were asked for"
    ]


def _about(request: FitRequest, loss: float) -> str:
    """The first line of the recipe."""
    if request.size_bytes is not None:
        size = f"{request.size_bytes:,} bytes"
    else:
        size = f"{request.bits:g} bits a weight"
    return f"{request.recipe.name} fitted to {size}: it loses about {loss:.4f} nats a token."


def _names(chosen: Mapping[str, Candidate]) -> dict[str, str]:
    return {name: one.name for name, one in chosen.items()}
