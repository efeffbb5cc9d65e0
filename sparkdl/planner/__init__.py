"""Plans how a model is divided among the ranks of a cluster: which layouts fit, how long a step takes, and why.

It knows neither Spark nor the training loop. Runs on the *driver*, or on any machine. Begin with ``layouts``:
:func:`plan` estimates memory (``memory``) and time (``cost``) of each layout from the shape of the model (``shape``,
``counting``) and the links and devices of the cluster (``cluster``), which ``measure`` measures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.lazy import attributes
from sparkdl.planner.cluster import DEVICES, LINKS, Cluster, Device, Link, make_cluster
from sparkdl.planner.shape import MODELS, DecoderShape, ModelShape, TrainingRecipe

if TYPE_CHECKING:
    from sparkdl.planner.counting import count
    from sparkdl.planner.layouts import Layout, Plan, plan
    from sparkdl.planner.on_ranks import choose_layout

# Their modules import torch.
__getattr__, __dir__ = attributes(
    __name__,
    {
        "Layout": ".layouts",
        "Plan": ".layouts",
        "choose_layout": ".on_ranks",
        "count": ".counting",
        "plan": ".layouts",
    },
)

__all__ = [
    "DEVICES",
    "LINKS",
    "MODELS",
    "Cluster",
    "DecoderShape",
    "Device",
    "Layout",
    "Link",
    "ModelShape",
    "Plan",
    "TrainingRecipe",
    "choose_layout",
    "count",
    "make_cluster",
    "plan",
]
