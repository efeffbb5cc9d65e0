"""The one door to Petastorm, and what lets Petastorm 0.12.1 run on today's libraries.

Runs on the *rank*. Begin with :mod:`.reader`, which reads a shard with Petastorm's machinery (``worker``, ``pool``).
:mod:`.containment` lets Petastorm's own modules, and no others, see pyarrow and NumPy with the names that these
removed; :mod:`.unischema` reads datasets that Petastorm wrote.
"""
