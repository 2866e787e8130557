"""TensorRT-RTX's Python package, and all in which it differs from TensorRT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....core.tensorrt_versions import TENSORRT_RTX
from ..tensorrt.package import Library
from .preload import preload


class _Rtx(Library):
    is_rtx, portable = True, False

    def prepare(self) -> None:
        preload()

    def loaders(self) -> Sequence[str]:
        return (*super().loaders(), "polygraphy.backend.tensorrt_rtx")

    def configuration(self, targets: Sequence[int], common: Mapping[str, Any]) -> Any:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        return CreateConfigRTX(compute_capabilities=[divmod(target, 10) for target in targets], **common)

    def adjust(self, trt: Any, config: Any) -> None:
        """Turn off TF32, which rounds the factors of fp32 products to 10 bits: an engine would miss its tolerance."""
        config.clear_flag(trt.BuilderFlag.TF32)

    def lacks_products(self, targets: Sequence[int]) -> bool:
        """Return whether a target is Turing, for which it has no fp32 matrix products."""
        return 75 in targets


PACKAGE = _Rtx(TENSORRT_RTX, "tensorrt_rtx", "rtx", "Install it: pip install 'localattn[rtx]'.")
