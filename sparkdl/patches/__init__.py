"""Changes to the insides of other libraries, one module for each.

Each module says what it changes and why, the upstream issue, the versions that need it, and when it can go. Begin
with :mod:`~sparkdl.patches.accelerate`. Runs on the *rank*. Petastorm's, which also run on the *driver*, are in
:mod:`sparkdl.data.petastorm`, which imports its package.
"""
