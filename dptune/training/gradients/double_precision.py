"""Double precision: model code that computes in float64 also where it asks for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Puts float64 in the place of float32: norms, softmax and rotations of many models are made in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with float64 wherever it was told float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **kwargs)
