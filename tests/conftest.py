"""What holds for all tests; what they share is the plugin ``support``."""

import compileall
import os
import resource
import signal
from pathlib import Path

import synkro.controller.session
from synkro.devices.gpus import visible

pytest_plugins = ["support"]

INLINE = 1 << 17
"""Outputs of more bytes than this go through Store and Reduce in the tests' sessions."""

synkro.controller.session._OUTBOXES = INLINE

if visible().gpus:  # the tests are of CPU workers, but for those in tests/gpu
    os.environ.setdefault("SYNKRO_DEVICES", "cpu")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Before all tests; where PYTHONDONTWRITEBYTECODE is set, each process would compile the package."""
    if visible().gpus:  # CUDA is to be met by interpreters as users have them
        config.option.fresh = True
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(synkro.__file__).parent, quiet=1)


def pytest_unconfigure(config):
    """Say what the tests took of the processors: on a busy machine the clock tells little of them."""
    if not hasattr(config, "workerinput"):
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        seconds = sum(each.ru_utime + each.ru_stime for each in used)
        print(f"processors: {seconds:.0f} s, user and system")


def pytest_addoption(parser, pluginmanager):
    """Where pytest-timeout is missing, the tests run without the limit that it would set them."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take, for pytest-timeout")
