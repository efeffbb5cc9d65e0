"""A feed's batches as tensors: for torch's DataLoader, and by the converter that users of Petastorm call.

A guest: :mod:`sparkdl.data` only names the converter, and imports it on first use. Begin with
:mod:`~sparkdl.loaders.feed_dataset` for a feed, or with :mod:`~sparkdl.loaders.converter` for a DataFrame, which the
*driver* writes and every *rank* reads.
"""
