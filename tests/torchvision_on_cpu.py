"""Makes a torchvision built for CUDA's torch importable beside a CPU build of torch, in one environment.

The torchvision on PyPI for Linux on x86-64 goes with PyPI's torch, which is built for CUDA. Beside a CPU build its C
library cannot be loaded, and ``import torchvision`` fails with "operator torchvision::nms does not exist", although
networks for classification and transforms need none of its operators. timm, torchmetrics and lightning import it and
fail as well.

``make setup`` runs this file as a script. If torchvision fails in this way, the script copies itself to the
environment, with a ``.pth`` file that makes each process of that environment import it at startup. It then declares
the two operators for which torchvision registers kernels for fake tensors in any case. They have no implementation:
calling them remains an error. If the C library loads, the script installs nothing.
"""

from __future__ import annotations

import sys
from typing import Any

_NAME = "_torchvision_on_cpu"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class OperatorDeclarer:
    """A module finder that finds no module, but declares the operators when torchvision is about to register fakes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Declare the operators, if the module is the one that needs them and the C library was not loaded."""
        if name == "torchvision._meta_registrations" and not sys.modules["torchvision.extension"]._has_ops():
            import torch

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    torch.library.define(f"torchvision::{operator}", _SCHEMA)


def install() -> None:
    """Make each process of this environment declare the operators if torchvision needs it here, or stop doing so."""
    import shutil
    import subprocess
    import sysconfig
    from pathlib import Path

    folder = Path(sysconfig.get_paths()["purelib"])
    module, start = folder / f"{_NAME}.py", folder / f"{_NAME}.pth"
    start.unlink(missing_ok=True)
    module.unlink(missing_ok=True)
    tried = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if "operator torchvision::nms does not exist" in tried.stderr:
        shutil.copyfile(__file__, module)
        start.write_text(f"import {_NAME}\n")
        print(
            "torchvision's operators are declared without an implementation, as needed with CPU builds of torch"
        )
        subprocess.run([sys.executable, "-c", "import torchvision"], check=True)
    elif tried.returncode:
        raise RuntimeError(f"torchvision cannot be imported: {tried.stderr}")


if __name__ == "__main__":
    install()
elif __name__ == _NAME:
    sys.meta_path.insert(0, OperatorDeclarer())  # type: ignore[arg-type]
