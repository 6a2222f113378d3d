"""Random tests: ``given`` and ``st`` of Hypothesis, and how many examples are drawn.

In a thorough run these are all, in others a third: most of what was found showed in the first eight.
Where Hypothesis is missing, as where GPUs are verified it may be, these tests are skipped.
"""

from unittest.mock import MagicMock

import pytest

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ImportError:
    st = MagicMock()

    def given(*_, **__):
        return pytest.mark.skip("hypothesis is missing")

    def examples(_):
        return lambda test: test

else:
    for name, count in {"usual": 33, "thorough": 100}.items():
        settings.register_profile(
            name,
            deadline=None,  # a busy machine is no failure
            max_examples=count,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )
    settings.load_profile("usual")

    def examples(count):
        """Settings of a test that draws *count* examples where others draw a hundred."""
        return settings(max_examples=max(5, count * settings.default.max_examples // 100))


__all__ = ["examples", "given", "st"]
