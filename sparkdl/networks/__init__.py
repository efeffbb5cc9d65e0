"""The networks that the ready-made estimators train, with what prepares their inputs.

Runs on driver, ranks and in served models; torch, no Spark. Each file is one kind of network with its inputs:
``tabular``, ``images``, ``text``, and ``backbones`` and ``pretrained`` for networks of other libraries.
"""
