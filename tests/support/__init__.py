"""What tests share, in folders named after the folders of tests that it serves most.

    models/       checkpoints: with random weights, or headers alone; tokenizers
    gguf/         GGUF files, and checkpoints that become some (families/)
    formats/      artifacts in every format
    runs/         whole runs in this process (quantizing), and runs that fail, die and go on
    cuda/         GPUs that are emulated; ptx/ executes what NVRTC compiles
    hostile/      files that lie; gallery/ has broken artifacts
    guard/        refuses connections that leave the machine

The others serve the tests of the folder of their name for the most part.

places.py has the paths; long_tests.py and remembered_ids.py serve conftest.py.
"""
