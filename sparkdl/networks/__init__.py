"""The networks that the ready-made estimators train, with what prepares their inputs.

Runs on driver, executors, ranks and in served models; torch, no Spark. Each kind of network is one file with its
inputs: ``tabular``, ``images``, ``text``, and ``language``, whose decoder is in ``decoder``. Networks of other
libraries come by ``backbones`` (torchvision and timm), ``pretrained`` and ``language_folder`` (Hugging Face).
``standardization`` and ``initial_weights`` are shared by several kinds.
"""
