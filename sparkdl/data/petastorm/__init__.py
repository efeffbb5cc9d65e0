"""The modules that import Petastorm, and adaptations with which Petastorm 0.12.1 runs on current libraries.

Runs on the *rank*. Begin with :mod:`.reader`, which reads a shard with Petastorm's machinery (``worker``, ``pool``).
:mod:`.containment` lets Petastorm's own modules, and no others, see pyarrow and NumPy with the names that newer
versions of these removed; :mod:`.unischema` reads datasets that Petastorm wrote.
"""
