"""Jobs: a training that a file describes, run on a laptop by ``sparkdl train`` and on a cluster by spark-submit.

Runs on the *driver*. Imported as it is, this needs neither pyspark nor torch.
"""
