"""FedSAM: the radius of its ascent step."""

import pytest

from kedge.check.problems import position, quadratics


@pytest.mark.parametrize(("slope", "radius"), [(1.0, 0.2), (1e-12, 0.1), (0.0, 0.0)])
def test_the_radius_shrinks_with_a_slope_near_zero(slope: float, radius: float) -> None:
    """f(w) = (w - a)^2 / 2 from w = 0, where the slope is -a and the ascent step goes to
    -rho a / (a + 1e-12): no length without a slope, half of rho at a = 1e-12."""
    run = quadratics((1.0,), (slope,), lr=0.5, steps=1).simulate("fedsam(rho=0.2)")
    run.run_round()
    assert position(run) == pytest.approx(0.5 * (slope + radius), rel=1e-9, abs=0)
