"""Evidence bundles: what is needed to run a failing computation again anywhere, and ``truestep confirm`` that does.

Layout, below the checkpoint root:

    bundles/<alarm id>/  inputs.pt     micro-batch, random number generators, buffers, loss scale
                         weights.pt    parameters before the update; absent where the bundle names a checkpoint
                         recorded.json what each party computed, fingerprints of the weights, every module's outputs
                         bundle.json   written last, with every file's SHA-256: without it the bundle does not exist

Names load on first use: the contents need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from truestep.bundle.contents import BundleError, BundleManifest
    from truestep.bundle.settings import BundleSettings

_HOME = {"BundleError": "contents", "BundleManifest": "contents", "BundleSettings": "settings"}

__all__ = ["BundleError", "BundleManifest", "BundleSettings"]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
