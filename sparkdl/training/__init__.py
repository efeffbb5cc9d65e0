"""Training on one rank, and the models that come out of it; torch and NumPy, no Spark.

On a *rank*: :mod:`.loop` trains what a :class:`.spec.TrainingSpec` says over an open communicator. On the
*driver*: :mod:`.probe` tries the model on one row before anything starts. Anywhere: :mod:`.saved_model`
stores a trained module, :mod:`.predictor` applies it and :mod:`.pyfunc` serves it. This file imports nothing,
so that a process which only serves a model loads neither the native core nor a reader.
"""
