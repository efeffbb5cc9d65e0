"""The one door to Petastorm, and what lets Petastorm 0.12.1 run on today's libraries.

- :mod:`.containment` lets Petastorm's own modules, and nobody else, see the facades,
- :mod:`.facades` are pyarrow and NumPy with the names that they removed,
- :mod:`.legacy_parquet` is the part of pyarrow's former Parquet classes that Petastorm uses,
- :mod:`.repairs` mends Petastorm's classes where a facade cannot,
- :mod:`.columns_worker`, :mod:`.ordered_pool` and :mod:`.reader` read a shard with Petastorm's machinery.
"""
