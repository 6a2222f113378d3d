"""Importing the stand-in for a while, into a process whose other tests must not find it."""

import contextlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent


def _forget():
    for name in [name for name in sys.modules if name == "cupy" or name.startswith("cupy.")]:
        del sys.modules[name]


@contextlib.contextmanager
def loaded(**environment):
    """The stand-in, with the environment that it should see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(FOLDER))
        _forget()
        try:
            import cupy
            import cupy.cuda.nccl

            yield cupy
        finally:
            _forget()
