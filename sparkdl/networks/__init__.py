"""The networks that the ready-made estimators train, and the classes that prepare their inputs.

Runs on driver, executors, ranks and in served models; uses torch, but no Spark. Begin with ``tabular``. Each kind of
network is one file with its inputs: ``tabular``, ``images``, ``text``, and ``language``, whose decoder is in
``decoder``. On the driver, networks of other libraries are made by ``backbones`` (torchvision and timm), ``pretrained``
and ``language_folder`` (Hugging Face), with ``adapters`` over their weights (LoRA). ``standardization`` is
shared by several kinds.
"""
