"""A machine that runs PTX in numpy, for want of a GPU: see machine.py.

    parse.py        text to instructions
    flow.py         basic blocks, and which registers live between them
    emit.py         a block of instructions as a Python function over arrays, a lane a thread
    rules_*.py      what becomes of each instruction
    arithmetic.py   integers and floats as the PTX ISA has them
    tensor.py       mma
    memory.py       all that is checked of an access; arrays.py and spaces.py hold the bytes
    machine.py      a grid: which lanes run, barriers
    building.py     PTX by NVRTC

Semantics are those of NVIDIA's "Parallel Thread Execution ISA". An instruction or a modifier of one
that no rule speaks of raises NotImplementedError.
"""
