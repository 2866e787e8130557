"""A machine for PTX in numpy: runs compiled kernels, the very text that the plugins embed, where there is no GPU.

    program     PTX text → instructions
    memory      global, shared and tensor memory, each access checked
    blocks      registers and control flow: every thread of some thread blocks, in lockstep
    scalar      instructions of one thread: arithmetic, comparisons, conversions
    groups      asynchronous work, in groups that are waited for
    transfer    loads, stores and asynchronous copies
    warp        instructions of a warp: shuffles, ldmatrix, stmatrix, mma
    wgmma       products of a warpgroup (Hopper)
    tcgen05     products in tensor memory (Blackwell)
    launch      a grid, as the CUDA driver launches it

It knows the instructions that the kernel compiles to, and refuses others. Semantics are those of NVIDIA's "Parallel
Thread Execution ISA", sections 9.7 (https://docs.nvidia.com/cuda/parallel-thread-execution). It is stricter than a
GPU: reads of memory that nothing wrote, of copies that were not waited for, and of what another warp wrote without a
barrier in between are faults. It says nothing of time, nor of what ptxas makes of the text.
"""
