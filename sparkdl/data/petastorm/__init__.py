"""The one door to Petastorm, and what makes Petastorm 0.12.1 run on today's pyarrow, NumPy, pandas and Python.

- :mod:`.containment` lets Petastorm's own modules, and nobody else, see the facades,
- :mod:`.facades` are pyarrow and NumPy with the names that they removed,
- :mod:`.legacy_parquet` is the part of pyarrow's former Parquet classes that Petastorm uses,
- :mod:`.repairs` mends Petastorm's classes where a facade cannot,
- :mod:`.columns_worker`, :mod:`.ordered_pool` and :mod:`.reader` read a shard with Petastorm's machinery.
"""
