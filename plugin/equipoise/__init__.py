"""Even work on every rank, the same loss on any cluster: step planning for RL post-training.

The public names are listed in ``__init__.pyi``. Each is imported when it is first used, so that ``import equipoise``
loads neither numpy nor torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType] - not typed

__version__ = "0.1.0"
