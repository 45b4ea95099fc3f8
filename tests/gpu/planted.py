"""A kernel with a mistake that compute-sanitizer has to find: what says that it looks at ours.

    compute-sanitizer ... python3 tests/gpu/planted.py memcheck|racecheck

Named as products are, and launched as they are; else the tool's "no errors" may be of no kernel.
"""

import sys
from unittest.mock import patch

import torch

from qtool.cuda import compiling, running
from qtool.cuda.tasks import Task

THREADS = 256
NAME = "gemv_planted"
# Past the end of an array with nothing after it; and a warp that reads what another one writes.
MISTAKES = {
    "memcheck": f"((volatile int *)values)[{THREADS} + threadIdx.x] = 1;",
    "racecheck": f"__shared__ volatile int room[{THREADS}]; room[threadIdx.x] = (int)threadIdx.x; "
    f"((int *)values)[threadIdx.x] = room[{THREADS - 1} - threadIdx.x];",
}


def source(mistake: str) -> str:
    """Of a kernel with the parameters that all of qtool's have."""
    head = f'#include "gemv.h"\nextern "C" __global__ void {NAME}(QT_PARAMETERS)\n'
    return f"{head}{{\n    {MISTAKES[mistake]}\n}}\n"


def main() -> None:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    code = compiling.compile_source("planted", source(sys.argv[1]), arch)
    kernel = compiling.core().ObjectCode.from_cubin(code).get_kernel(NAME)
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    task = Task(NAME, (1, 1), {"values": out.data_ptr()}, THREADS)
    with patch.object(running, "_kernel", lambda *_: kernel):
        running.launch(task)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
