"""sparkdl trains PyTorch models on the machines of a Spark cluster."""
