"""An emulator of NVIDIA's GPUs at the level of PTX, for the kernels of this project.

It executes what Triton or nvcc has made of a kernel, not the kernel's source, on the memory of this process,
and reports what a GPU would not tell: accesses beyond what a kernel may touch, races by vector clocks,
reads of what nobody has written or of copies that are not waited for, different values stored to one
address, warps that have parted where they must be together, and threads that wait for ever. It counts what
is executed. It says nothing of time.

`ptx` reads a kernel. `blocks` translates its basic blocks to functions on numpy arrays: `flow` knows which
block follows which, `writer` the variables, and `instructions` and `memory_instructions` what each
instruction becomes. `machine` runs a grid of them. `memory` and `order` check accesses; `strong`
has atomics and fences, by which blocks learn of each other. `warps` and `matrices` are what a warp does
together, and `asynchronous` and `products` what Hopper does beside its threads. Instructions that no kernel
here has are unknown, and refused: most when a kernel is translated, a few forms of known ones when they are
executed.
"""
