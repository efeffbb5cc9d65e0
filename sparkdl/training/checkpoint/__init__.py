"""Checkpoints of a fit: written in the background, complete or not at all; a resumed fit gives the same bits.

Runs on the *rank*; the driver checks the folder before it starts ranks. Begin with
:mod:`~sparkdl.training.checkpoint.checkpointing`; ``choice`` chooses the checkpoint to resume from,
``fit_manifest`` describes it, and ``identity`` has the settings in which a fit and a checkpoint have to agree.
"""
