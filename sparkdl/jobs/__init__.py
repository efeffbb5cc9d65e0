"""Jobs: training described by a YAML file, run on one machine by ``sparkdl train`` or on a cluster by spark-submit.

Runs on the *driver*. Begin with ``run_job``; ``job`` reads the file. Importing this package needs neither pyspark nor
torch.
"""
