"""What becomes of every tensor of a checkpoint: decided before anything is written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qtool.checkpoints import structure
from qtool.checkpoints.roles import roles_of
from qtool.converting.certificate import Squares
from qtool.converting.model import DTYPE_NAMES, Model, Tensor
from qtool.converting.obstacles import ANEW, OFFSETS, ROUNDED, SCALES, Obstacle, refuse
from qtool.converting.plain import plain
from qtool.converting.survey import Survey, survey, with_whole_scale
from qtool.converting.targets import Target
from qtool.errors import UnsupportedError
from qtool.formats import FORMATS, Options
from qtool.formats.layer_names import is_head
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo, byte_size
from qtool.formats.stored_codes import SCALE_DTYPES
from qtool.messages.progress import Progress
from qtool.scheme import Scheme

NO_LAYOUT = Options("")

_SMALL_FLOATS = ("mlx", "compressed-tensors")  # formats that have some, to the byte


@dataclass(frozen=True)
class Step:
    """One tensor: codes under `scheme`, or a dense tensor of `dtype`.

    lossy: None where the numbers stay what they are, else what is done to them; `why` says what
    stands against more.
    """

    tensor: Tensor
    scheme: Scheme | None
    dtype: str
    lossy: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """A checkpoint to write: every tensor in order."""

    format: str
    steps: tuple[Step, ...]
    options: Options = NO_LAYOUT
    dense: tuple[str, ...] = ()  # linear layers without codes
    act_order: bool = False  # some columns are out of group order


def dense_plan(tensors: Sequence[Tensor], dtype: str) -> Plan:
    """Everything as plain numbers: matrices in `dtype`, the rest as it is unless that widens it."""
    steps = []
    for tensor in tensors:
        widened = dtype == "F32" and tensor.dtype in FLOAT_DTYPES
        leaves = tensor.leaves
        plain = all(one.read is None and one.dtype == tensor.dtype for one in leaves)
        kept = plain and not widened
        steps.append(Step(tensor, None, tensor.dtype if kept else dtype))
    return Plan("hf", tuple(steps))


def in_dtype(model: Model, dtype: str) -> Model:
    """The model with a config.json that says this dtype."""
    config = dict(model.config)
    key = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    config[key] = DTYPE_NAMES[dtype]
    return replace(model, dtype=dtype, config=config)


def codes_plan(target: Target, model: Model, lossy: bool, dtype: str, progress: Progress) -> Plan:
    """Every linear layer's codes in another format; refuses what cannot be done.

    dtype: of quantized tensors that are no linear layers, which become plain numbers.
    """
    if model.format == target.format == "mlx":
        raise UnsupportedError(f"{model.path}: is MLX's already")
    merge = model.format == "gguf"
    # llama.cpp's files often have a head of a type of its own, which needs not be quantized; and
    # AWQ has one width for all.
    layers, dense = linear_layers(model, any_head=not merge and target.format != "awq")
    tensors = [tensor for tensor in model.quantized if tensor.name in layers]
    if not tensors:
        raise UnsupportedError(
            f"{model.path}: cannot become {target.name}: none of its linear layers is quantized, "
            f"only {model.quantized[0].name}; dequantize that with --to hf"
        )
    found = [
        survey(tensors[number], merge=merge, recorded=model.group_size)
        for number in progress.blocks(len(tensors), "matrix")
    ]
    size = _common_size(found, model.group_size) if merge else None
    wanted, options = _schemes(target, found, model, size)
    obstacles = []
    for seen in found:
        obstacles += _obstacles(target, seen, wanted.get(seen.tensor.name), options)
    together = FORMATS[target.format].supports_together(set(wanted.values()))
    if wanted and together is not None:
        obstacles.append(Obstacle(next(iter(wanted)), f"and others differ: {together}"))
    others = [tensor for tensor in model.quantized if tensor.name not in layers]
    obstacles += [one for tensor in others if (one := _rounds(tensor, dtype)) is not None]
    refuse(model.path, target, obstacles, lossy)
    against = {obstacle.name: obstacle for obstacle in reversed(obstacles)}
    steps = []
    for tensor in model.tensors:
        plain = tensor.dtype if tensor.read is None else dtype
        step = Step(tensor, wanted.get(tensor.name), plain)
        if (obstacle := against.get(tensor.name)) is not None:
            step = replace(step, lossy=obstacle.lossy, why=obstacle.reason)
        steps.append(step)
    reordered = any(seen.reordered for seen in found)
    return Plan(target.format, tuple(steps), options, tuple(sorted(dense)), reordered)


def linear_layers(model: Model, *, any_head: bool) -> tuple[set[str], set[str]]:
    """Names of the quantized tensors that keep their codes: linear layers, and a head, any or one
    stored like them; and of all others that engines would take for linear layers."""
    infos = {tensor.name: info_of(tensor) for tensor in model.tensors}
    blocks = structure.find_blocks(infos, model.config)
    usual = Counter(tensor.stored for tensor in model.quantized).most_common(1)[0][0]
    known = roles_of(infos, blocks)
    layers, dense = set(), set()
    for tensor in model.tensors:
        reason = known[tensor.name].reason
        other_head = not any_head and is_head(tensor.module) and tensor.stored != usual
        if tensor.read is not None and reason != "embedding" and not other_head:
            layers.add(tensor.name)
        elif len(tensor.shape) == 2 and tensor.name.endswith(".weight") and reason != "embedding":
            dense.add(tensor.name)
    return layers, dense


def info_of(tensor: Tensor) -> TensorInfo:
    """The header's entry in an unquantized checkpoint; of matrices with codes, made up."""
    dtype = "F16" if tensor.read is not None else tensor.dtype
    return TensorInfo(tensor.name, dtype, tensor.shape, 0, byte_size(dtype, tensor.shape))


def _common_size(found: Sequence[Survey], recorded: int | None) -> int | None:
    """The largest group size that says the same of all of them; None where each keeps its own."""
    usable = [one for one in found if one.scheme is not None]
    if not usable:
        return None
    sizes = frozenset.intersection(*(one.sizes for one in usable))
    if recorded in sizes:
        return recorded
    grouped = max((size for size in sizes if size > 0), default=None)
    return -1 if grouped is None and -1 in sizes else grouped


def _schemes(
    target: Target, found: Sequence[Survey], model: Model, size: int | None
) -> tuple[dict[str, Scheme], Options]:
    """What every matrix with codes gets, and the layout of all."""
    symmetric = all(one.scheme.symmetric for one in found if one.scheme is not None)
    dtype = _scale_dtype(target, found, model)
    wanted = {}
    for one in found:
        small = _floats(target, one)
        if small is not None and _unheld(target, small, one.tensor.shape) is None:
            wanted[one.tensor.name] = small
        if one.scheme is not None:
            group = one.scheme.group_size if size is None else size
            outer = "offset" if target.format == "mlx" else ""
            wanted[one.tensor.name] = Scheme(one.scheme.bits, group, symmetric, dtype, outer=outer)
    options: Options = FORMATS[target.format].choose(list(wanted.values()), target.layout)
    return wanted, options


def _floats(target: Target, one: Survey) -> Scheme | None:
    """What a matrix of small floats becomes, to the number, in formats that have some: NVFP4 of
    MLX's gets a scale of the whole matrix, of 1, where all have one."""
    if one.floats is None or target.format not in _SMALL_FLOATS:
        return None
    return with_whole_scale(one.floats) if target.format == "compressed-tensors" else one.floats


def _unheld(target: Target, floats: Scheme, shape: tuple[int, ...]) -> str | None:
    """Why one of these formats has no small floats of a scheme to the byte, or None."""
    module: Any = FORMATS[target.format]
    why: str | None = module.supports(floats, shape, module.choose([floats], target.layout))
    return why


def _scale_dtype(target: Target, found: Sequence[Survey], model: Model) -> str:
    """float16; or, where the format leaves a choice, the first that loses nothing."""
    if target.format == "mlx":  # products are of one dtype where scales are like the rest
        own = SCALE_DTYPES[model.dtype]
        fits = all(own in one.scale_dtypes for one in found if one.scheme is not None)
        return own if fits else "float16"
    if target.format != "compressed-tensors":
        return "float16"
    kept = [one.scale_dtypes for one in found if one.scheme is not None]
    held = frozenset.intersection(*kept) if kept else frozenset()
    known = str(model.recorded(target.format, "scale_dtype"))
    if model.format == target.format:
        known = str(found[0].tensor.scale_dtype)
    order = (known, "float16", "bfloat16", "float32")
    return next((dtype for dtype in order if dtype in held), "float16")


def _obstacles(
    target: Target, one: Survey, scheme: Scheme | None, options: Options
) -> list[Obstacle]:
    """Why one matrix cannot be stored exactly, what is worst first."""
    name: str = one.tensor.name
    floats = _floats(target, one)
    if floats is not None and floats == scheme:
        return []
    if one.scheme is None or scheme is None:
        hint = "dequantize it with --to hf, and quantize that"
        why = str(one.obstacle)
        if floats is not None:
            why = f"is stored as {one.tensor.stored}: {_unheld(target, floats, one.tensor.shape)}"
        return [Obstacle(name, why, hint=hint)]
    module: Any = FORMATS[target.format]
    found = [] if one.obstacle is None else [Obstacle(name, one.obstacle, one.lossy)]
    reason = module.supports(scheme, one.tensor.shape, options)
    if reason is not None:
        asymmetric = target.name == "gptq" and not scheme.symmetric
        nearly = "" if one.obstacle is None else ", rounded (--lossy)"
        hint = f"--to gptq-v2 holds them{nearly}" if asymmetric else ""
        found.append(Obstacle(name, f"cannot be stored: {reason}", hint=hint))
    if one.reordered and target.format != "gptq":
        reason = f"has columns out of group order (desc_act), which {target.format} cannot store"
        found.append(Obstacle(name, reason, ANEW))
    if scheme.scale_dtype not in one.scale_dtypes:
        reason = f"has {one.scheme.scale_dtype} scales, which {scheme.scale_dtype} rounds"
        found.append(Obstacle(name, reason, SCALES))
    elif target.format == "mlx" and scheme.scale_dtype not in one.offset_dtypes:
        reason = f"has zeros times scales that {scheme.scale_dtype}, as mlx stores them, rounds"
        found.append(Obstacle(name, reason, OFFSETS))
    return found


def _rounds(tensor: Tensor, dtype: str) -> Obstacle | None:
    """What stands against a tensor as plain numbers of a dtype."""
    assert tensor.read is not None
    sums = Squares()
    plain(tensor, tensor.read(), dtype, sums)
    if sums.same:
        return None
    reason = (
        f"is no linear layer, so it becomes plain numbers, and {DTYPE_NAMES[dtype]} rounds its "
        f"{tensor.stored}"
    )
    return Obstacle(tensor.name, reason, ROUNDED, hint="--dtype float32 holds it")
