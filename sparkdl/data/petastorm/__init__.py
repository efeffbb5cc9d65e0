"""Petastorm's API for its own data: datasets with a Unischema, transforms, and Petastorm 0.12.1 on current libraries.

A guest: nothing else in sparkdl imports it, and the feed loads it by name for a dataset or a ``TransformSpec`` of
Petastorm. Runs on the *rank*. Begin with :mod:`.unischema`, which reads datasets that Petastorm wrote;
:mod:`.containment` lets Petastorm's own modules, and no others, see pyarrow and NumPy with the names that newer
versions of these removed. What the feed itself takes of Petastorm is in :mod:`sparkdl.data.feed.shard_reader`.
"""
