"""The error function, made of elementary operations of an array namespace, because NumPy does not have it."""

from collections.abc import Sequence

from shoal.program import Array
from shoal_worker.arrays import Namespace

# float64: the rational approximations of FreeBSD's msun, s_erf.c (Sun Microsystems, 1993), lowest power first. Its
# error is less than one unit in the last place; here it is a few, because exp(-x^2) is computed without a split.
_SMALL_P = (
    1.28379167095512558561e-01,
    -3.25042107247001499370e-01,
    -2.84817495755985104766e-02,
    -5.77027029648944159157e-03,
    -2.37630166566501626084e-05,
)
_SMALL_Q = (
    1.0,
    3.97917223959155352819e-01,
    6.50222499887672944485e-02,
    5.08130628187576562776e-03,
    1.32494738004321644526e-04,
    -3.96022827877536812320e-06,
)
_NEAR_ONE = 8.45062911510467529297e-01
_ONE_P = (
    -2.36211856075265944077e-03,
    4.14856118683748331666e-01,
    -3.72207876035701323847e-01,
    3.18346619901161753674e-01,
    -1.10894694282396677476e-01,
    3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)
_ONE_Q = (
    1.0,
    1.06420880400844228286e-01,
    5.40397917702171048937e-01,
    7.18286544141962662868e-02,
    1.26171219808761642112e-01,
    1.36370839120290507362e-02,
    1.19844998467991074170e-02,
)
_LARGE_P = (
    -9.86494403484714822705e-03,
    -6.93858572707181764372e-01,
    -1.05586262253232909814e01,
    -6.23753324503260060396e01,
    -1.62396669462573470355e02,
    -1.84605092906711035994e02,
    -8.12874355063065934246e01,
    -9.81432934416914548592e00,
)
_LARGE_Q = (
    1.0,
    1.96512716674392571292e01,
    1.37657754143519042600e02,
    4.34565877475229228821e02,
    6.45387271733267880336e02,
    4.29008140027567833386e02,
    1.08635005541779435134e02,
    6.57024977031928170135e00,
    -6.04244152148580987438e-02,
)
_HUGE_P = (
    -9.86494292470009928597e-03,
    -7.99283237680523006574e-01,
    -1.77579549177547519889e01,
    -1.60636384855821916062e02,
    -6.37566443368389627722e02,
    -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)
_HUGE_Q = (
    1.0,
    3.03380607434824582924e01,
    3.25792512996573918826e02,
    1.53672958608443695994e03,
    3.19985821950859553908e03,
    2.55305040643316442583e03,
    4.74528541206955367215e02,
    -2.24409524465858183362e01,
)
# Bounds between the approximations; above the last one the value rounds to 1.
_TO_ONE, _TO_LARGE, _TO_HUGE, _TO_CONSTANT = 0.84375, 1.25, 1 / 0.35, 6.0

# float32: x P(x^2) / Q(x^2) on [-4, 4], as Eigen's generic_fast_erf_float; accurate to a few units in the last place.
_SINGLE_P = (
    -1.60960333262415e-02,
    -2.95459980854025e-03,
    -7.34990630326855e-04,
    -5.69250639462346e-05,
    -2.10102402082508e-06,
    2.77068142495902e-08,
    -2.72614225801306e-10,
)
_SINGLE_Q = (
    -1.42647390514189e-02,
    -7.37332916720468e-03,
    -1.68282697438203e-03,
    -2.13374055278905e-04,
    -1.45660718464996e-05,
)
_SINGLE_BOUND = 4.0


def erf(xp: Namespace, x: Array) -> Array:
    """Returns 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x, element by element.

    Args:
        xp: the namespace of x, passed in so that `fused` functions can call this.
        x: float32 or float64.
    """
    return _single(xp, x) if x.dtype.itemsize == 4 else _double(xp, x)


def _single(xp: Namespace, x: Array) -> Array:
    x = xp.clip(x, -_SINGLE_BOUND, _SINGLE_BOUND)
    square = x * x
    return x * _polynomial(_SINGLE_P, square) / _polynomial(_SINGLE_Q, square)


def _double(xp: Namespace, x: Array) -> Array:
    size = xp.minimum(xp.abs(x), _TO_CONSTANT)
    # Each approximation is computed for all elements, with x clipped to its range.
    small = xp.minimum(size, _TO_ONE)
    square = small * small
    value = small + small * _ratio(_SMALL_P, _SMALL_Q, square)
    middle = xp.clip(size, _TO_ONE, _TO_LARGE) - 1
    value = xp.where(size >= _TO_ONE, _NEAR_ONE + _ratio(_ONE_P, _ONE_Q, middle), value)
    large = xp.maximum(size, _TO_LARGE)
    inverse = 1 / (large * large)
    tail = xp.where(large < _TO_HUGE, _ratio(_LARGE_P, _LARGE_Q, inverse), _ratio(_HUGE_P, _HUGE_Q, inverse))
    far = 1 - xp.exp(-large * large - 0.5625 + tail) / large
    return xp.copysign(xp.where(size >= _TO_LARGE, far, value), x)


def _ratio(p: Sequence[float], q: Sequence[float], x: Array) -> Array:
    return _polynomial(p, x) / _polynomial(q, x)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value = (value + coefficient) * x
    return value + coefficients[0]
