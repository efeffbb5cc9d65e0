"""Horovod's collectives: synchronous, asynchronous and in-place forms, and the gradients that flow through them.

Runs on the *rank*. Begin with ``allreduce``; the other files have the same shape. Signatures, defaults and results are
those of ``horovod.torch`` 0.28.1.
"""
