"""Declares the operators of torchvision before it is imported.

PyPI's torchvision is built for CUDA, so its compiled operators don't load with a CPU build of torch. Without
their names, its Python code fails, which Transformers imports for models that read images. Nothing calls the
operators for text.
"""

import importlib.abc
import sys

_OPERATORS = ("nms", "qnms")


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name in _OPERATORS:
                torch.library.define(
                    f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou) -> Tensor"
                )


sys.meta_path.insert(0, _Declare())
