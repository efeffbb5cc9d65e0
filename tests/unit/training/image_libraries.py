"""Stand-ins for torchvision and timm, as packages in a folder: what the real ones are asked for, on a tiny network."""

from __future__ import annotations

TORCHVISION = """
from enum import Enum
from types import SimpleNamespace

import torch
from torch import nn

class TinyNetwork(nn.Module):
    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        version = local_metadata.get("version")
        if version not in (1, 2):  # as mnasnet has it
            raise ValueError(f"version should be 1 or 2 instead of {version}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __init__(self, num_classes=1000):
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, images):
        return self.fc(self.norm(self.features(images)).mean(dim=(2, 3)))

class SquareNetwork(TinyNetwork):
    def forward(self, images):
        torch._assert(images.shape[2] == 4, f"Wrong image height! Expected 4 but got {images.shape[2]}!")
        return super().forward(images)

def list_models(module=None):
    assert module.__name__ == "torchvision.models"
    return ["tiny_network", "square_network", "vast_network"]

def get_model(name, *, weights=None, **options):
    made = SquareNetwork(**options) if name == "square_network" else TinyNetwork(**options)
    if name == "vast_network":
        raise ValueError("too vast")
    if weights is not None:
        assert weights == "DEFAULT" and not options
        with torch.no_grad():
            for tensor in made.parameters():
                tensor.fill_(0.5)
    return made

class TinyWeights(Enum):
    V1 = "url"
    DEFAULT = V1

    def transforms(self):
        return SimpleNamespace(mean=[0.5, 0.25, 0.75], std=[0.125, 0.25, 0.5])  # lists, unlike timm's

def get_model_weights(name):
    return {"tiny_network": TinyWeights, "vast_network": Enum("NoWeights", [])}[name]
"""

TIMM = """
from types import SimpleNamespace

from torchvision.models import TinyNetwork, get_model

TAGGED = {"tiny_network": 0.5, "tiny_network.first": 0.5, "tiny_network.second": 0.75}

def list_models(*, pretrained=False):
    return [name for name in TAGGED if ("." in name) is pretrained]

def get_pretrained_cfg(name):
    return SimpleNamespace(mean=(TAGGED[name],) * 3, std=(0.25, 0.25, 0.25))

def create_model(name, *, pretrained, num_classes):
    assert name in TAGGED
    made = TinyNetwork(num_classes)
    made.is_pretrained = pretrained
    return made
"""


def install(folder, monkeypatch):
    """Have these stand-ins imported in the place of whatever is installed, until the test ends."""
    import sys

    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text("from torchvision import models\n")
    (folder / "torchvision" / "models.py").write_text(TORCHVISION)
    (folder / "timm.py").write_text(TIMM)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "timm")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torchvision", "torchvision.models", "timm"):
        monkeypatch.setitem(
            sys.modules, name, None
        )  # so that what is imported meanwhile goes when the test ends
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(folder))
