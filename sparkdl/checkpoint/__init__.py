"""Checkpoints of fits, scripts and states of a Runner: complete or not at all, written while training continues.

Runs on the *rank*; the *driver* lists checkpoints, and reads those of finished fits. Begin with
:mod:`~sparkdl.checkpoint.folder`, which has the format of a checkpoint and the rule of its commit.
``tensors`` stores a model and its optimizer by names that do not depend on how they are divided among ranks; a model
that is not divided has one part. ``writer`` writes on a thread. ``training_state`` has the state that survives lost
ranks, and ``commit_place`` the place of its commits. Does not know what is trained.
"""
