"""bfloat16, by ml_dtypes: an array dtype like the others, whose sums and means accumulate in float32."""

import subprocess
import sys

import numpy as np
import pytest

import synkro as synk
from support.programs import ROOT
from support.sessions import lasting

bfloat16 = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes (the extra test)").bfloat16
VALUES = np.random.default_rng(0).standard_normal((1000, 3)).astype(bfloat16)

pytestmark = pytest.mark.counted_once

session = lasting(2)


def rounded(exact):
    return np.asarray(exact).astype(bfloat16)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("slices", [1, 7])
def test_outputs_are_reduced_in_float32(session, op, slices):
    each = synk_rows(op)
    got = session.function(each, outputs=op)(VALUES, num_slices=slices)
    wide = VALUES.astype("float32")
    want = getattr(wide, op)(axis=0)
    assert got.dtype == bfloat16
    step = 2.0**-7  # bfloat16 has 8 digits; every piece's own output is rounded to them
    np.testing.assert_allclose(
        got.astype("float32"), want, rtol=step, atol=step * np.abs(wide).sum() / 50
    )
    if op in ("max", "min"):
        np.testing.assert_array_equal(got, rounded(want))


def synk_rows(op):
    return lambda x: getattr(x.astype("float32"), op)(axis=0).astype(x.dtype)


def test_many_small_terms_are_not_lost(session):
    ones = np.ones((4096, 1), bfloat16)  # in bfloat16 a sum of ones ends at 256
    assert session.function(lambda x: x[0], outputs="sum")(ones, num_slices=500) == 1000


def test_gathered_kept_and_large_outputs_stay_what_they_are(session):
    rows = session.function(lambda x: x, outputs="gather")(VALUES)
    np.testing.assert_array_equal(rows, VALUES)
    kept = session.function(lambda x: x, outputs="keep")(VALUES[:1])  # the other rank has no rows
    assert kept.dtype == bfloat16
    assert session.get_lengths(kept) == [1, 0]
    large = np.tile(VALUES, (1, 60000))[:4]
    got = session.function(lambda x: x[0], outputs="sum")(large)
    want = (large[0].astype("float32") + large[2].astype("float32")).astype(bfloat16)
    np.testing.assert_array_equal(got, want)


def test_variables_collectives_and_files(session, tmp_path):
    w = session.shared(VALUES[:5], name="w")
    session.function(lambda: synk.all_reduce(w, op="sum"), outputs=[])()
    want = rounded(VALUES[:5].astype("float32") * 2)
    np.testing.assert_array_equal(w.get_value(), want)
    session.save(tmp_path / "w")
    w.set_value(np.zeros((5, 3), bfloat16))
    session.load(tmp_path / "w")
    np.testing.assert_array_equal(w.get_value(), want)
    total = session.function(lambda: synk.all_reduce(w.value[0], op="max"), outputs=None)()
    np.testing.assert_array_equal(total[0], want[0])


def test_data_of_it(session):
    x = session.data(VALUES)
    assert x.dtype == bfloat16
    x[0] = 2
    assert session.function(lambda x: x.astype("float32").max(), outputs="max")(x, batch=1) == 2


def test_the_main_process_need_not_have_imported_it():
    code = (
        "import synkro as synk, sys\n"
        "synk.fork(2, verbose=False)\n"
        "def f(n):\n"
        "    import ml_dtypes, numpy\n"
        "    return numpy.ones(3, ml_dtypes.bfloat16)\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "assert synk.function(f, bcast_inputs='n', outputs='sum')(1).tolist() == [2, 2, 2]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
