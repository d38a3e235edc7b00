"""Whether this process is a forked child.

It has none of its parent's threads, and does not know that they are gone.
"""

from __future__ import annotations

import os

import torch

_is_forked = False


def is_forked() -> bool:
    """Whether the process was forked after the library had been imported."""
    return _is_forked


def enter_child() -> None:
    """What is to be done in a forked child, before anything else."""
    # Torch, too, would wait for threads that stayed behind; its data loaders set the same in their workers.
    global _is_forked
    _is_forked = True
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


# Here and not beside the kernels, which may be loaded only in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=enter_child)
