"""The checks of parallel models, as a mode: in the first step of a model, in every step, or never.

A script can be wrong in ways that no shape shows: ranks read different rows, call different layers, or divide layers
that work only as a whole. Each rank would then silently train a different model. The functions that prepare a model
make a :class:`~sparkdl.parallel.verify.verification.Verification`, whose hooks compare what the ranks do; begin there.
The layers compute alike with it and without it.
"""
