"""What holds for all tests; what they share is the plugin ``support``."""

import compileall
import contextlib
import os
import signal
from pathlib import Path

import synkro.controller.session
from synkro.devices.gpus import visible

pytest_plugins = ["support"]

INLINE = 1 << 17
"""Outputs of more bytes than this go through Store and Reduce in the tests' sessions."""

synkro.controller.session._OUTBOXES = INLINE

with contextlib.suppress(ImportError):  # where GPUs are verified it may be missing
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)  # a busy machine is no failure
    settings.load_profile("patient")
if visible().gpus:  # the tests are of CPU workers, but for those in tests/gpu
    os.environ.setdefault("SYNKRO_DEVICES", "cpu")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Compile the package once: where PYTHONDONTWRITEBYTECODE is set, each process would."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(synkro.__file__).parent, quiet=1)


def pytest_addoption(parser, pluginmanager):
    """Where pytest-timeout is missing, the tests run without the limit that it would set them."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take, for pytest-timeout")
