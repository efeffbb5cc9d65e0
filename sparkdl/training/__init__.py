"""Training on one rank over an open communicator; torch and NumPy, no Spark.

On a *rank*: begin with :mod:`.trainer`, which trains what a :class:`.spec.TrainingSpec` says; the way of a batch is
``batches``, ``step``, ``objective`` and ``update``. On the *driver*: :mod:`.probe` tries the model on one row before
ranks are started. Checkpoints are in :mod:`.checkpoint`; what a fit's driver calls on ranks is in :mod:`.remote`.
"""
