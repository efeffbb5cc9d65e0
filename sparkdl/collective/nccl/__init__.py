"""Ranks with a GPU each that communicate by NCCL, beside the communicator that they were opened over.

Begin with :mod:`~sparkdl.collective.nccl.opening`, which finds the library and has the ranks agree; ``group`` is what
it gives. ``hierarchy`` is for several hosts: NCCL inside each, a process set across. Knows arrays in GPU memory, no
torch. Runs on ranks.
"""
