"""Saving, loading and predicting with trained models, without Spark, feed or communicator.

Runs on driver, executors and in MLflow's servers. Begin with :mod:`~sparkdl.model.saved_model`, the files of a model;
:mod:`~sparkdl.model.predictor` computes predictions, :mod:`~sparkdl.model.served_model` is the model that MLflow
serves, and :mod:`~sparkdl.model.served_columns` converts the columns of a request.
"""
