"""Jobs: training described by a YAML file, run on one machine by ``sparkdl train`` or on a cluster by spark-submit.

Runs on the *driver*. Importing this package needs neither pyspark nor torch.
"""
