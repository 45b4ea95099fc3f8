"""What the machine that runs PTX (tests/support/ptx) has to find: threads that do not meet, races,
accesses that are not allowed, and what is read that nobody wrote."""

import numpy as np

from support.cuda.ptx_by_hand import launch

TURN = """
    mul.wide.u32 %rd1, %r70, 4; mov.u64 %rd2, room; add.s64 %rd3, %rd2, %rd1;
    st.shared.u32 [%rd3], %r70;
    bar.sync 0;
    xor.b32 %r3, %r70, 63; mul.wide.u32 %rd4, %r3, 4; add.s64 %rd5, %rd2, %rd4;
    ld.shared.u32 %r4, [%rd5]; st.global.u32 [%rd10], %r4;
"""


def test_threads_meet() -> None:
    """What others left in shared memory; races, and what nobody wrote."""
    out = np.zeros(128, np.uint32)
    assert launch(TURN, 64, 2, out=out) is None
    assert out.tolist() == [*range(63, -1, -1)] * 2
    assert "race: shared memory" in str(launch(TURN.replace("bar.sync 0;", ""), 64, 2, out=out))
    late = TURN.replace("bar.sync 0;", "bar.sync 0; bar.sync 0;")
    assert launch(late, 64, 2, out=np.zeros(128, np.uint32)) is None
    again = TURN + "st.shared.u32 [%rd3], %r4;"
    assert "race: shared memory is written" in str(
        launch(again, 64, 2, out=np.zeros(128, np.uint32))
    )
    fewer = TURN.replace("st.shared.u32 [%rd3], %r70;",
                         "setp.eq.s32 %p1, %r70, 9; @!%p1 st.shared.u32 [%rd3], %r70;")  # fmt: skip
    assert "that no thread wrote, byte" in str(launch(fewer, 64, 2, out=np.zeros(128, np.uint32)))
    same = TURN.replace("[%rd3], %r70", "[%rd2], %r70")
    assert "race: shared memory is written" in str(launch(same, 64, 2, out=out))


def test_a_barrier_that_some_do_not_reach() -> None:
    out = np.zeros(64, np.uint32)
    ended = "setp.lt.s32 %p1, %r70, 3; @%p1 bra $end; " + TURN + " $end:"
    assert "a barrier that not all threads" in str(launch(ended, 64, out=out))
    apart = (
        "setp.lt.s32 %p1, %r70, 3; @%p1 bra $one; bar.sync 0; bra.uni $end; $one: bar.sync 0; $end:"
    )
    assert "a barrier that not all threads" in str(launch(apart, 64, out=out))


def test_ways_part_and_meet() -> None:
    """Loops of as many turns as the thread's number, with a way out in the middle."""
    out = np.zeros(64, np.uint32)
    loop = """
        mov.u32 %r1, 0; mov.u32 %r2, 0;
    $again: setp.ge.u32 %p1, %r1, %r70; @%p1 bra $done;
        add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1;
        setp.eq.u32 %p2, %r1, 40; @%p2 bra $done; bra.uni $again;
    $done: st.global.u32 [%rd10], %r2;"""
    assert launch(loop, 64, out=out) is None
    assert out.tolist() == [sum(range(min(n, 40))) for n in range(64)]


def test_global_memory() -> None:
    out, more = np.zeros(32, np.uint32), np.arange(32, dtype=np.uint32)
    copy = "ld.global.u32 %r1, [%rd11]; st.global.u32 [%rd10], %r1;"
    assert launch(copy, out=out, more=more) is None
    assert out.tolist() == more.tolist()

    def broken(body: str, threads: int = 32, **given: object) -> str:
        return str(launch(body, threads, out=np.zeros(32, np.uint32), more=more, **given))

    assert broken(copy, 33) == "read outside of the array more, byte 128 of 128"
    assert "write outside of the array out" in broken("st.global.u32 [%rd10+4], %r70;")
    assert "read outside of the array more, byte -4" in broken(copy.replace("%rd11", "%rd21+-4"))
    assert "no multiple of its size" in broken(copy.replace("[%rd11]", "[%rd11+2]"), 8)
    assert "no multiple of its size" in broken("ld.global.v2.u32 {%r1, %r2}, [%rd11];", 8)
    assert "written twice" in broken("st.global.u32 [%rd20], %r70;")
    assert "written twice" in broken(copy + "st.global.u32 [%rd10], %r1;")
    assert "which is only read" in broken("st.global.u32 [%rd11], %r70;", only_read=("more",))
    assert "as if nobody did" in broken(copy + "ld.global.nc.u32 %r2, [%rd10];")
    assert "which is only read" in broken(
        "ld.global.nc.u32 %r2, [%rd10]; st.global.u32 [%rd10], %r2;"
    )
    assert "outside of every array" in broken("mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1];")
    other = "xor.b32 %r2, %r70, 1; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd2, %rd20, %rd1;"
    assert "race: out is read" in broken(f"{copy} {other} ld.global.u32 %r3, [%rd2];")
    assert broken(f"{copy} {other} bar.sync 0; ld.global.u32 %r3, [%rd2];") == "None"


LEAVE = """
    add.s32 %r1, %r72, 5; st.global.cg.u32 [%rd11], %r1; bar.sync 0;
    setp.ne.s32 %p1, %r70, 0; @%p1 bra $meet;
    atom.acq_rel.gpu.global.add.u32 %r2, [%rd22], 1;
    mov.u64 %rd2, room; st.shared.u32 [%rd2], %r2;
    $meet: bar.sync 0;
    mov.u64 %rd3, room; ld.shared.u32 %r3, [%rd3];
    setp.ne.s32 %p2, %r3, 2; @%p2 bra $end;
    mul.wide.u32 %rd4, %r70, 4; add.s64 %rd5, %rd21, %rd4;
    ld.global.cg.u32 %r4, [%rd5]; ld.global.cg.u32 %r5, [%rd5+128];
    ld.global.cg.u32 %r6, [%rd5+256];
    add.s32 %r7, %r4, %r5; add.s32 %r8, %r7, %r6;
    add.s64 %rd6, %rd20, %rd4; st.global.u32 [%rd6], %r8;
    $end:
"""


def test_blocks_leave_each_other_something() -> None:
    """The last to count adds up; not without the atomic, nor without either barrier."""

    def sums(body: str) -> tuple[str | None, np.ndarray]:
        out, left, done = (np.zeros(n, np.uint32) for n in (32, 96, 1))
        return launch(body, 32, 3, out=out, left=left, done=done), out

    said, out = sums(LEAVE)
    assert said is None and out.tolist() == [3 * (5 + 32 + n) for n in range(32)]
    assert "race" in str(sums(LEAVE.replace("bar.sync 0;", "", 1))[0])
    before, _, after = LEAVE.rpartition("$meet: bar.sync 0;")
    assert "race" in str(sums(before + "$meet:" + after)[0])
    plain = LEAVE.replace("atom.acq_rel.gpu.global.add.u32 %r2, [%rd22], 1;", "mov.u32 %r2, 2;")
    assert "written twice" in str(sums(plain)[0]) or "race" in str(sums(plain)[0])


def test_what_was_never_written() -> None:
    out = np.zeros(32, np.uint32)
    local = "mov.u64 %rd1, own; {} ld.local.u32 %r1, [%rd1+8]; st.global.u32 [%rd10], %r1;"
    assert launch(local.format("st.local.u32 [%rd1+8], %r70;"), out=out) is None
    assert out.tolist() == list(range(32))
    assert "local memory that the thread did not" in str(launch(local.format(""), out=out))
    odd = "setp.eq.s32 %p1, %r70, 7; @!%p1 st.local.u32 [%rd1+8], %r70;"
    assert "local memory that the thread did not" in str(launch(local.format(odd), out=out))
    some = "setp.eq.s32 %p1, %r70, 7; @%p1 bra $over; mov.u32 %r5, 1; $over:"
    some += "st.global.u32 [%rd10], %r5;"
    assert "register %r5 is read that was never" in str(launch(some, out=out))
    far = "mov.u64 %rd1, own; st.local.u32 [%rd1+64], %r70;"
    assert launch(far, out=out) == "write outside of local memory, byte 64 of 64"
    generic = "mov.u64 %rd1, own; cvta.local.u64 %rd2, %rd1; st.u32 [%rd2], %r70;"
    generic += "ld.local.u32 %r1, [%rd1]; st.u32 [%rd10], %r1;"
    out[:] = 0
    assert launch(generic, out=out) is None and out.tolist() == list(range(32))
    zero = "mov.u32 %r1, 0; div.u32 %r2, %r70, %r1; st.global.u32 [%rd10], %r2;"
    assert "division by zero" in str(launch(zero, out=out))


def test_waiting_for_other_kernels() -> None:
    out = np.zeros(32, np.uint32)
    wait, store = "griddepcontrol.wait;", "st.global.u32 [%rd10], %r70;"
    assert launch(wait + store, waits=True, out=out) is None
    assert "without having waited" in str(launch(store + wait, waits=True, out=np.zeros_like(out)))
    assert "does not wait for the kernels before, number 0" in str(launch("", waits=True, out=out))


COPY = """
    mul.wide.u32 %rd1, %r70, 4; mov.u64 %rd2, room; add.s64 %rd3, %rd2, %rd1; cvt.u32.u64 %r1, %rd3;
    cp.async.ca.shared.global [%r1], [%rd11], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+128], [%rd11+128], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.warp.sync -1;
    xor.b32 %r3, %r70, 31; mul.wide.u32 %rd4, %r3, 4; add.s64 %rd5, %rd2, %rd4;
    ld.shared.u32 %r4, [%rd5];
    bar.warp.sync -1;
    cp.async.ca.shared.global [%r1], [%rd11], 4;
    cp.async.wait_all_of_them;
    st.global.u32 [%rd10], %r4;
""".replace("wait_all_of_them", "commit_group; cp.async.wait_group 0")


def test_several_readers() -> None:
    """Of one word: whichever lane writes it then has to meet the others, of other warps, too."""
    read = "mov.u64 %rd2, room; setp.eq.s32 %p1, %r70, 5; @%p1 st.shared.u32 [%rd2], %r70; "
    read += "bar.sync 0; ld.shared.u32 %r4, [%rd2]; st.global.u32 [%rd10], %r4; "
    write = "setp.eq.s32 %p1, %r70, {}; @%p1 st.shared.u32 [%rd2], %r70;"
    race = "race: shared memory is written"
    for lane in (0, 17, 31):
        out = np.zeros(32, np.uint32)
        assert race in str(launch(read + write.format(lane), 32, out=out))
        met = read + "bar.warp.sync -1; " + write.format(lane)
        assert launch(met, 32, out=np.zeros(32, np.uint32)) is None
    for lane in (0, 31, 32, 63):
        met = read + "bar.warp.sync -1; " + write.format(lane)
        assert race in str(launch(met, 64, out=np.zeros(64, np.uint32)))
        met = read + "bar.sync 0; " + write.format(lane)
        assert launch(met, 64, out=np.zeros(64, np.uint32)) is None


def test_copies_are_waited_for() -> None:
    """Asynchronous copies to shared memory, which other lanes of a warp read."""
    more = np.arange(64, dtype=np.uint32)

    def said(body: str, threads: int = 32) -> str | None:
        out = np.zeros(threads, np.uint32)
        found = launch(body, threads, out=out, more=more)
        assert found or out.tolist() == [*range(31, -1, -1)]
        return found

    assert said(COPY) is None
    early = "that no thread wrote, byte"
    assert early in str(said(COPY.replace("wait_group 1", "wait_group 2")))
    assert early in str(said(COPY.replace("[%rd5];", "[%rd5+128];")))
    assert early in str(said(COPY.replace("cp.async.commit_group;", "", 1)))
    before, after = COPY.split("bar.warp.sync -1;", 1)
    assert "race: shared memory is read" in str(said(before + after))
    before, after = COPY.rsplit("bar.warp.sync -1;", 1)
    assert "race: shared memory is written" in str(said(before + after))
    part = COPY.replace("bar.warp.sync", "setp.lt.s32 %p1, %r70, 9; @%p1 bar.warp.sync", 1)
    assert "bar.warp.sync by a part of a warp" in str(said(part))
    assert "outside of the array more" in str(said(COPY.replace("+128]", "+4096]").replace(
        "[%r1+4096]", "[%r1]")))  # fmt: skip
    assert "outside of shared" in str(said(COPY.replace("[%r1+128]", "[%r1+1024]")))
    # While one is under way, nobody writes its place, by another copy either; all come in time.
    race = "race: shared memory is written"
    assert race in str(said(COPY.replace("+128]", "+0]")))
    stored = "cp.async.commit_group; st.shared.u32 [%rd3], %r70;"
    assert race in str(said(COPY.replace("cp.async.commit_group;", stored, 1)))
    late = COPY.replace("cp.async.wait_group 1;", "bar.warp.sync -1; st.shared.u32 [%rd3], %r70;")
    assert race in str(said(late))
    assert "ends before its copies have come" in str(
        said(COPY.replace("wait_group 0", "wait_group 1"))
    )
    # Two warps do not meet each other.
    other = COPY.split("bar.warp.sync -1;\n    cp")[0].replace("%r70, 31", "%r70, 63")
    other = other.replace("+128]", "+256]")
    out = np.zeros(64, np.uint32)
    assert "race: shared memory is read" in str(
        launch(other, 64, out=out, more=np.arange(128, dtype=np.uint32))
    )
