"""Training on one rank over an open communicator; torch and NumPy, no Spark.

On a *rank*: begin with :mod:`.trainer`, which trains according to a :class:`.spec.TrainingSpec`; a batch passes
through ``device_batches``, ``step``, ``objective`` and ``update``. On the *driver*: :mod:`.probe` tries the model on
one row before ranks are started. Checkpoints are in :mod:`.checkpoint`; the functions that a fit's driver runs on ranks
are in :mod:`.remote`.
"""
