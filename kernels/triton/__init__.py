"""Kernels for NVIDIA GPUs, written in Triton: one file an operation.

Every file has `variants()`: what the engine launches, with types and launch parameters, so that each can be compiled
for its target on a machine without a GPU (`compiled.py`) and read as a table (`python -m kernels.triton.report`). With
TRITON_INTERPRET=1 in the environment before Triton is imported, the same functions run on CPU tensors.
"""
