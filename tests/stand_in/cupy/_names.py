"""Names that the real CuPy 14.2 and NumPy share; nothing else of NumPy is offered.

What only NumPy has must fail here as it would there.
"""


def _words(text):
    return frozenset(text.split())


# Universal functions.
UFUNCS = _words(
    """
    abs absolute acos acosh add arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
    atan2 atanh bitwise_and bitwise_count bitwise_invert bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor cbrt ceil conj conjugate copysign cos cosh deg2rad degrees
    divide divmod equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin fmod frexp gcd
    greater greater_equal heaviside hypot invert isfinite isinf isnan lcm ldexp left_shift less
    less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor matmul maximum minimum mod modf multiply negative nextafter not_equal positive pow
    power rad2deg radians reciprocal remainder right_shift rint sign signbit sin sinh sqrt square
    subtract tan tanh true_divide trunc
    """
)

# Other functions that work on arrays.
FUNCTIONS = _words(
    """
    all allclose amax amin angle any append argmax argmin argpartition argsort argwhere around
    array2string array_equal array_equiv array_repr array_split array_str astype atleast_1d
    atleast_2d atleast_3d average bartlett base_repr binary_repr bincount blackman broadcast_arrays
    broadcast_to can_cast choose clip column_stack common_type compress concat concatenate convolve
    copy corrcoef correlate count_nonzero cov cross cumprod cumsum cumulative_prod cumulative_sum
    delete diag diag_indices diag_indices_from diagflat diagonal diff digitize dot dsplit dstack
    ediff1d einsum expand_dims extract eye fill_diagonal fix flatnonzero flip fliplr flipud
    format_float_positional format_float_scientific gradient hamming hanning histogram histogram2d
    histogramdd hsplit hstack i0 identity imag indices inner interp intersect1d isclose iscomplex
    iscomplexobj isfortran isin isneginf isposinf isreal isrealobj isscalar ix_ kaiser kron lexsort
    linspace logspace mask_indices matmul matrix_transpose max may_share_memory mean median meshgrid
    min min_scalar_type moveaxis nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean
    nanmedian nanmin nanprod nanstd nansum nanvar ndim nonzero outer packbits pad partition
    percentile permute_dims place poly polyadd polyfit polymul polysub polyval prod ptp put
    put_along_axis putmask quantile ravel ravel_multi_index real real_if_close repeat reshape resize
    result_type roll rollaxis roots rot90 round searchsorted select setdiff1d setxor1d shape
    shares_memory sinc size sort sort_complex split squeeze stack std sum swapaxes take_along_axis
    tensordot tile trace transpose trapezoid tri tril tril_indices tril_indices_from trim_zeros triu
    triu_indices triu_indices_from union1d unique unique_all unique_counts unique_inverse
    unique_values unpackbits unravel_index unwrap vander var vdot vsplit vstack where
    """
)

# What CuPy takes from NumPy as it is.
SHARED = _words(
    """
    bool bool_ broadcast_shapes byte cdouble complex128 complex64 complexfloating csingle double
    dtype e euler_gamma finfo float16 float32 float64 floating generic get_printoptions half iinfo
    index_exp inexact inf int16 int32 int64 int8 int_ intc integer intp isdtype issubdtype iterable
    long longlong mintypecode nan newaxis number pi printoptions promote_types s_ set_printoptions
    short signedinteger single typename ubyte uint uint16 uint32 uint64 uint8 uintc uintp ulong
    ulonglong unsignedinteger ushort
    """
)

# Methods of arrays that NumPy does without further ado.
METHODS = _words(
    """
    all any argmax argmin argpartition argsort choose clip compress conj conjugate cumprod cumsum
    diagonal dot flatten max mean min nonzero partition prod ptp put repeat round searchsorted sort
    squeeze std sum swapaxes trace transpose var
    """
)

# Functions and methods that only make views or look at shapes: no work for the device.
VIEWS = _words(
    """
    array_split atleast_1d atleast_2d atleast_3d base_repr binary_repr broadcast_arrays broadcast_to
    can_cast common_type diagonal dsplit expand_dims flip fliplr flipud hsplit iscomplexobj
    isfortran isrealobj isscalar matrix_transpose may_share_memory min_scalar_type moveaxis ndim
    permute_dims result_type rollaxis rot90 shape shares_memory size split squeeze swapaxes
    transpose vsplit
    """
)

# Functions of linalg.
LINALG = _words(
    """
    cholesky cond cross det eig eigh eigvals eigvalsh inv lstsq matmul matrix_power matrix_rank
    matrix_transpose norm pinv qr slogdet solve svd tensorinv tensorsolve
    """
)

# Functions whose answer stays on the device, where NumPy gives a bool.
TRUTHS = _words(
    """
    allclose array_equal array_equiv
    """
)
