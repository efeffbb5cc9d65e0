"""The part of an estimator's fit that runs on ranks, and what travels between them and the driver.

Begin with :mod:`~sparkdl.training.remote.fit_on_rank`. ``transfer`` brings the spec to the ranks and the trained module
back, by a folder of the Store: both ends are there. ``host_watch`` samples the load of the hosts for MLflow.
"""
