"""A fit, from the call of ``fit(df)`` to the model. Runs on the *driver*.

Begin with :mod:`~sparkdl.estimators.fit.fit`. The order of a fit is ``rows`` (the training rows in the Store),
``split`` (training and validation rows), ``inputs`` and ``labels`` (the content of the columns), ``probe`` (the model
on one row), ``dry_run`` (a step on the driver), ``checkpoints``, and then :mod:`sparkdl.training.remote`, which runs on
ranks.
"""
