"""Loads, stores, copies, atomics, and what waits. The machine checks each access (memory.py)."""

from support.ptx.emit import Writer, bits_of, form_of, rule, size_of, strict
from support.ptx.parse import Instruction, split

_TYPES = [f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)] + ["f32", "f64"]
_SPACES = ("global", "shared", "local")


def space_of(ins: Instruction) -> str:
    found = [part for part in ins.parts if part in _SPACES]
    return found[0] if found else "generic"


@rule("ld")
def _load(w: Writer, ins: Instruction) -> None:
    strict(ins, "param", "nc", "cg", "v2", "v4", *_SPACES, *_TYPES)
    type_ = ins.parts[-1]
    targets = split(ins.operands[0].strip("{}"))
    if "param" in ins.parts:
        name = ins.operands[1].strip("[] ")
        number = w.kernel.parameters.index(name)
        return w.define(
            targets[0], f"m.parameters[{number}].astype({form_of(type_)})", form_of(type_)
        )
    at, size, count = w.address(ins.operands[1]), size_of(type_), len(targets)
    more = f", {'nc' in ins.parts}" if space_of(ins) == "global" else ""
    found = w.keep(f"m.load_{space_of(ins)}(lanes, {at}, {size}, {count}{more})")
    for k, name in enumerate(targets):
        own = f"{found}[{k}]" if count > 1 else found
        if type_[0] in "sf":
            own += f".view({form_of(type_)})"
        w.define(name, own, form_of(type_))
    return None


@rule("prefetch")
def _prefetch(w: Writer, ins: Instruction) -> None:
    """Of what may be read; nobody sees that it was."""
    if ins.name != "prefetch.global.L2":
        raise NotImplementedError(ins.name)
    w.keep(f"m.load_global(lanes, {w.address(ins.operands[0])}, 4, 1, False)")


@rule("st")
def _store(w: Writer, ins: Instruction) -> None:
    strict(ins, "cg", "v2", "v4", *_SPACES, *_TYPES)
    form = bits_of(ins.parts[-1])
    values = [w.use(name, form) for name in split(ins.operands[1].strip("{}"))]
    at = w.address(ins.operands[0])
    w.line(f"m.store_{space_of(ins)}(lanes, {at}, {form[1:]}, [{', '.join(values)}])")


@rule("atom")
def _atomic(w: Writer, ins: Instruction) -> None:
    if ins.name != "atom.acq_rel.gpu.global.add.u32":
        raise NotImplementedError(ins.name)
    to, at, value = ins.operands
    w.define(to, f"m.count_up(lanes, {w.address(at)}, {w.use(value, 'u4')})", "u4")


@rule("griddepcontrol")
def _wait(w: Writer, ins: Instruction) -> None:
    strict(ins, "wait", "launch_dependents")
    if "wait" in ins.parts:
        w.line("m.wait(lanes)")


@rule("bar")
def _meet(w: Writer, ins: Instruction) -> None:
    if ins.name != "bar.warp.sync" or ins.operands[0] not in ("-1", "0xffffffff", "4294967295"):
        raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
    w.line("m.meet_warps(lanes)")


@rule("mbarrier")
def _barrier(w: Writer, ins: Instruction) -> None:
    if ins.name == "mbarrier.init.shared.b64":
        at, count = ins.operands
        w.line(f"m.begin_barrier(lanes, {w.address(at)}, {w.use(count, 'u4')})")
    elif ins.name == "mbarrier.arrive.expect_tx.shared.b64" and ins.operands[0] == "_":
        _, at, count = ins.operands
        w.line(f"m.expect_bytes(lanes, {w.address(at)}, {w.use(count, 'u4')})")
    elif ins.name == "mbarrier.try_wait.parity.shared.b64":
        to, at, parity = ins.operands
        w.define(to, f"m.wait_at(lanes, {w.address(at)}, {w.use(parity, 'u4')})", "b")
    else:
        raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")


@rule("fence")
def _fence(w: Writer, ins: Instruction) -> None:
    """Orders what barriers are begun with before copies that count at them."""
    if ins.name != "fence.mbarrier_init.release.cluster":
        raise NotImplementedError(ins.name)


BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@rule("cp")
def _copy(w: Writer, ins: Instruction) -> None:
    if ins.name == BULK:
        to, at, count, barrier = ins.operands
        places = f"{w.address(to)}, {w.address(at)}, {w.use(count, 'u4')}, {w.address(barrier)}"
        w.line(f"m.copy_bulk(lanes, {places})")
        return
    strict(ins, "async", "ca", "cg", "shared", "global", "commit_group", "wait_group")
    if "commit_group" in ins.parts:
        w.line("m.close_copies(lanes)")
    elif "wait_group" in ins.parts:
        w.line(f"m.wait_for_copies(lanes, {int(ins.operands[0])})")
    else:
        if len(ins.operands) != 3:  # a fourth would tell how much of it is zeros
            raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
        to, at = (w.address(operand) for operand in ins.operands[:2])
        nbytes = int(ins.operands[2])
        if nbytes not in ((16,) if "cg" in ins.parts else (4, 8, 16)):
            raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
        w.line(f"m.copy_async(lanes, {to}, {at}, {nbytes})")
