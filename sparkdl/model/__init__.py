"""All that a trained model needs to be saved, loaded and asked: no Spark, no feed, no communicator.

Runs on driver, executors and in MLflow's servers. Begin with :mod:`~sparkdl.model.saved_model`, the files of a model;
:mod:`~sparkdl.model.predictor` computes predictions, :mod:`~sparkdl.model.served_model` is what MLflow serves, and
:mod:`~sparkdl.model.served_columns` what a request's columns become.
"""
