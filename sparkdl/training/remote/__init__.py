"""The part of an estimator's fit that runs on ranks, and the data transfer between ranks and driver.

Begin with :mod:`~sparkdl.training.remote.fit_on_rank`. ``transfer`` moves the spec to the ranks and the trained module
back, through a folder of the Store; it holds both ends. ``host_watch`` samples the load of the hosts for MLflow.
"""
