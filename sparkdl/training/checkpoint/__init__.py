"""Checkpoints of a fit: written beside the training, complete or not at all, and continued from to the bit.

Runs on the *rank*; the driver looks at folders before it starts ranks. Begin with
:mod:`~sparkdl.training.checkpoint.checkpointing`; ``files`` describes the files, ``identity`` what a checkpoint has
to agree with.
"""
