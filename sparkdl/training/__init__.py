"""Training on one rank over an open communicator; torch and NumPy, no Spark.

Runs on a *rank*; on the driver, :mod:`sparkdl.estimators.fit.probe` tries the model on one row before ranks are
started. Begin with :mod:`.trainer`, which trains according to a :class:`.spec.TrainingSpec`; a batch passes through
``device_batches``, ``step``, ``objective`` and ``update``. Checkpoints are in :mod:`.checkpoint`; the functions that a
fit's driver runs on ranks are in :mod:`.remote`.
"""
