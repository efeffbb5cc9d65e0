"""Pretrained weights of torchvision and timm in the folders where these cache downloads; nothing is downloaded."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

TORCHVISION, TIMM = "torchvision:mnasnet0_5", "timm:test_resnet"
"""A small network of each library; test_resnet is one that timm has for tests."""


def keep_weights(folder, monkeypatch):
    """Make the libraries find cached weights of these networks, with biases of 0.5, until ``monkeypatch`` is undone."""
    import huggingface_hub.constants
    import timm
    from torchvision.models import get_model, get_model_weights

    def marked(network):
        with torch.no_grad():
            for name, tensor in network.named_parameters():
                if name.endswith("bias"):
                    tensor.fill_(0.5)
        return network.state_dict()

    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    kept = folder / "torch" / "hub" / "checkpoints"
    kept.mkdir(parents=True)
    file = get_model_weights("mnasnet0_5").DEFAULT.url.rpartition("/")[2]
    torch.save(marked(get_model("mnasnet0_5", weights=None)), kept / file)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    kept = folder / "hub" / f"models--{timm.get_pretrained_cfg('test_resnet').hf_hub_id.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(revision)
    (kept / "snapshots" / revision).mkdir(parents=True)
    weights = marked(timm.create_model("test_resnet", pretrained=False))
    save_file(weights, kept / "snapshots" / revision / "model.safetensors")
