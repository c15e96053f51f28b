"""GaussianTau against integrals by a dense grid: its threshold is where the expected mass is 1."""

import math

import pytest
import torch

import flowlib
from flowlib import FORMAT, as_vtensor
from flowlib.errors import OptionError, ShapeError
from flowlib.kernels import gaussian as launch
from flowlib.ops import GaussianFloor, GaussianTau
from flowlib.ops.gaussian_tau import expected_power, truncated_moment
from flowlib.runtime import interpreter
from flowlib.testing import scene
from flowlib.testing.tolerance import rounding_step

HEADS, PAGE = 2, 4
LENGTHS = [41, 1, 0, 26, 9]
WIDTH = 13
ALPHAS = [4 / 3, 1.5, 1.7, 2.0]


def bench(page_size=PAGE, lengths=LENGTHS, width=WIDTH, **spec):
    sizes = {"page_size": page_size, "head_dim": 16, "group_size": 3, "num_kv_heads": HEADS, "max_pages": width}
    spec = flowlib.Spec(**sizes, kv_dtype=torch.float32, **spec)
    plan = flowlib.profile(flowlib.build("quest"), spec)
    pages = len(lengths) * width
    table = torch.arange(pages, dtype=torch.int32).flip(0).view(width, len(lengths)).T.contiguous()
    batch = flowlib.Batch(table, torch.tensor(lengths, dtype=torch.int32))
    return plan, flowlib.PagedPool(plan, pages), batch


def run(op, mu, sigma, impl, setting, dtype=torch.float32):
    plan, pool, batch = setting
    ctx = flowlib.RunContext(plan, pool, batch, impl=impl, dtype=dtype)
    return op(as_vtensor(mu, FORMAT.RAGGED, ctx), as_vtensor(sigma, FORMAT.RAGGED, ctx)).data


def draw(seed=0, lanes=3):
    g = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS) * HEADS * WIDTH, lanes, 1)
    return 2 * torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 0.05


def mass_by_grid(a, tau, mean, sigma, weight):
    """Σ weight · E[max(a·S − tau, 0)^(1/a)] by the trapezoid rule over ±12 deviations, float64."""
    z = torch.linspace(-12, 12, 40001, dtype=torch.float64)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    total = 0.0
    for m, s, w in zip(mean.tolist(), sigma.tolist(), weight.tolist(), strict=True):
        y = (a * (m + s * z) - tau).clamp(min=0) ** (1 / a)
        total += w * torch.trapezoid(y * density, z).item()
    return total


def rows_of(values):
    return values.view(len(LENGTHS), HEADS, WIDTH, -1).double()


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_expected_mass_at_tau_is_one(alpha, mixture):
    mu, sigma = draw()
    op, setting, a = GaussianTau(alpha, excess=0.0, mixture=mixture), bench(), alpha - 1
    tau = run(op, mu, sigma, "reference", setting, torch.float64).view(len(LENGTHS), HEADS, 3)
    for b, length in enumerate(LENGTHS):
        scored = max(0, -(-length // PAGE) - 2)
        for lane in range(3):
            if scored == 0:
                assert tau[b, 1, lane] == 0
                continue
            m = rows_of(mu)[b, 1, 1 : 1 + scored, lane]
            s = rows_of(sigma)[b, 1, 1 : 1 + scored, lane]
            weight = torch.full((scored,), float(PAGE), dtype=torch.float64)
            if not mixture:
                spread = ((s * s).mean() + m.var(correction=0)).sqrt()
                m, s, weight = m.mean()[None], spread[None], weight.sum()[None]
            assert mass_by_grid(a, tau[b, 1, lane].item(), m, s, weight) == pytest.approx(1.0, abs=2e-4)


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_fp32_is_near_float64(alpha, mixture, impl):
    mu, sigma = draw(1)
    op, setting = GaussianTau(alpha, 0.3, 0.1, mixture), bench()
    truth = run(op, mu, sigma, "reference", setting, torch.float64)
    low = run(op, mu, sigma, "reference", setting, torch.float32)
    result = run(op, mu, sigma, impl, setting)
    step = torch.finfo(torch.float32).eps * (mu.abs().max() + 12 * sigma.max())
    allowed = 2 * (low - truth).abs().max() + 8 * step
    assert (result - truth).abs().max() <= allowed


def test_far_tails_keep_their_digits_over_a_million_tokens():
    """Trap of the public formula: the normal CDF as 0.5 · (1 + erf) in fp32 is off by 2 here."""
    page, width = 128, 8194
    setting = bench(page, [page * width], width)
    mu = torch.zeros(HEADS * width, 1, 1)
    sigma = torch.full_like(mu, 4.0)
    op = GaussianTau(1.5, excess=0.0)
    truth = run(op, mu, sigma, "reference", setting, torch.float64)
    assert truth[0].item() > 4.0, "the threshold lies far out"
    assert (run(op, mu, sigma, "triton", setting) - truth).abs().max() <= 1e-3 * truth.abs().max()


@pytest.mark.parametrize("mixture", [False, True])
def test_long_rows_with_outliers_in_front(mixture):
    """More than one block of pages, the first of which lies far from the rest: moments in one pass lose no digits."""
    width = 4300
    setting = bench(PAGE, [width * PAGE, 4100 * PAGE], width)
    g = torch.Generator().manual_seed(4)
    mu = 0.5 * torch.randn(2 * HEADS * width, 1, 1, generator=g)
    mu.view(2, HEADS, width)[:, :, :40] += 30.0
    sigma = 0.05 + 0.3 * torch.rand(mu.shape, generator=g)
    op = GaussianTau(1.5, 0.3, 0.1, mixture)
    truth = run(op, mu, sigma, "reference", setting, torch.float64)
    result = run(op, mu, sigma, "triton", setting)
    assert (result - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("width", [4097, 6000])
def test_parts_of_a_row_give_what_the_row_gives(width):
    """The parts' moments are joined; rows of no page, of one part, of a part and a page, and whole ones."""
    lengths = torch.tensor([0, 5 * PAGE, 1026 * PAGE, 2047 * PAGE, width * PAGE - 1], dtype=torch.int32)
    g = torch.Generator().manual_seed(width)
    mu = 100 + torch.randn(len(lengths) * HEADS, 3, width, generator=g)
    sigma = torch.rand(mu.shape, generator=g)
    mu[:, :, 0], sigma[:, :, 0], mu[:, :, -1] = 1e6, torch.nan, torch.nan  # reserved
    given = {
        "num_kv_heads": HEADS, "page_size": PAGE, "bos": 1, "eos": 1, "alpha": 1.5, "safety_margin_z": 0.1,
        "excess": 0.1, "mixture": False,
    }  # fmt: skip
    interpreter.install()
    parts = launch.parts_of(width)
    assert (parts, launch.parts_of(4096)) == (-(-width // 1024), 0)
    whole, joined, estimate = (torch.full((len(mu), 3), torch.nan) for _ in range(3))
    moments = torch.full((len(mu), 3, parts, 3), torch.nan)
    launch.launch_gaussian_tau(mu, sigma, whole, lengths, **given)
    launch.launch_gaussian_tau(mu, sigma, joined, lengths, **given, moments=moments, estimate=estimate)
    pages = -(-lengths // PAGE).repeat_interleave(HEADS)[:, None]
    scored = (torch.arange(width) >= 1) & (torch.arange(width) < pages - 1)
    op = GaussianTau(1.5, 0.1, 0.1, False).bound(bench()[0].spec)
    truth = op.meaning(*(x.double().permute(0, 2, 1)[..., None] for x in (mu, sigma)), scored=scored)[:, 0, :, 0]
    off, allowed = (joined - truth).abs(), (whole - truth).abs().max()
    assert (off <= 2 * allowed + rounding_step(truth, torch.float32)).all(), (off.max(), allowed)
    assert (joined <= estimate).all()
    assert not joined[: 2 * HEADS - 2].any()


def test_one_launch_gives_floor_and_estimate():
    """A plan whose flow estimates the threshold launches once for both; what each reads is its own."""
    flow = flowlib.build("entmax_gaussian_attention", tau_mode="fixed", safety_margin_z=0.4)
    spec = flowlib.Spec(page_size=PAGE, head_dim=16, num_kv_heads=1, group_size=2, kv_dtype=torch.float32, max_pages=9)
    plan = flowlib.profile(flow, spec)
    together = plan._executor.together
    assert [(name, later, argument) for name, (_, later, argument) in together.items()] == [
        ("gaussiantau", "gaussianfloor_2", "estimate")
    ]
    made = scene(plan, (35, 3, 18))
    wanted, got = (plan.step(made.q, made.pool_by(impl), made.batch, impl=impl) for impl in ("reference", "triton"))
    torch.testing.assert_close(got.tau, wanted.tau, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.pages, wanted.pages)
    assert GaussianFloor(1.5).also_gives(GaussianTau(1.5, excess=0.0, mixture=None)) == "estimate"
    for other in (GaussianTau(1.5, mixture=None), GaussianTau(2.0, excess=0.0, mixture=None), GaussianFloor(1.5)):
        assert not GaussianFloor(1.5).also_gives(other)


def test_a_plan_of_long_rows_has_room_for_their_parts():
    flow = flowlib.build("entmax_gaussian_attention", tau_mode="fixed", safety_margin_z=0.0)
    spec = flowlib.Spec(page_size=1, head_dim=16, num_kv_heads=1, group_size=1, kv_dtype=torch.float32, max_pages=4200)
    plan = flowlib.profile(flow, spec)
    made = scene(plan, (4200, 1100))
    rooms = plan.allocate(2, 4200, "cpu").workspace
    assert {name: tuple(x.shape) for name, x in rooms.items() if ":" in name}["gaussianfloor_2:moments"] == (2, 1, 5, 3)
    got = plan.step(made.q, made.pool_by("triton"), made.batch, impl="triton")
    low, exact = (
        plan.step(made.q, made.pool_by("reference"), made.batch, dtype=t) for t in (torch.float32, torch.float64)
    )
    allowed = 2 * (low.tau - exact.tau).abs().max() + rounding_step(exact.tau, torch.float32)
    assert ((got.tau - exact.tau).abs() <= allowed).all()
    assert torch.equal(got.pages, exact.pages)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("mixture", [False, True])
def test_pages_without_spread(mixture, impl):
    """sigma 0 everywhere: entmax of point masses, whose threshold brackets must not miss."""
    mu, _ = draw(2)
    mu = torch.zeros_like(mu) if not mixture else mu
    setting, op = bench(), GaussianTau(2.0, excess=0.0, mixture=mixture)
    tau = run(op, mu, torch.zeros_like(mu), impl, setting).view(len(LENGTHS), HEADS, 3)
    scored = -(-LENGTHS[0] // PAGE) - 2
    m = rows_of(mu)[0, 0, 1 : 1 + scored, 0]
    support = PAGE * (m - tau[0, 0, 0].double()).clamp(min=0)
    assert support.sum().item() == pytest.approx(1.0, abs=1e-3)


def test_the_margin_lowers_the_threshold():
    mu, sigma = draw(3)
    setting = bench()
    plain, by_z, by_excess = (
        run(GaussianTau(1.5, *margin), mu, sigma, "reference", setting, torch.float64)
        for margin in ((0.0, 0.0), (0.4, 0.0), (0.0, 0.2))
    )
    m, s = rows_of(mu)[0, 0, 1:10, 0], rows_of(sigma)[0, 0, 1:10, 0]
    spread = ((s * s).mean() + m.var(correction=0)).sqrt()
    assert by_z[0, 0, 0].item() == pytest.approx((plain[0, 0, 0] - 0.5 * 0.4 * spread).item(), abs=1e-9)
    above = (plain[0, 0, 0] / 0.5 - (m + 1.5 * s).mean()).clamp(min=0)
    assert by_excess[0, 0, 0].item() == pytest.approx((plain[0, 0, 0] - 0.5 * 0.2 * above).item(), abs=1e-9)


def test_moments_of_the_standard_normal():
    zero = torch.zeros(1, dtype=torch.float64)
    assert truncated_moment(zero, 3.0).item() == pytest.approx(math.sqrt(2 / math.pi), rel=1e-12)
    for beta in (1.0, 2.0, 3.0):
        t = torch.linspace(-6, 6, 25, dtype=torch.float64)
        torch.testing.assert_close(truncated_moment(t, beta), truncated_moment(t, beta + 1e-7), rtol=1e-3, atol=1e-9)
    far = expected_power(torch.tensor([3.0]), torch.tensor([0.0]), 4.0)
    assert far.item() == pytest.approx(81.0, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.0}, "GaussianTau: alpha is 1.0, expected a number above 1 and at most 2"),
        ({"alpha": 2.5}, "GaussianTau: alpha is 2.5, expected a number above 1 and at most 2"),
        ({"alpha": 1.5, "excess": -0.1}, "GaussianTau: excess is -0.1, expected at least 0"),
        ({"alpha": 1.5, "safety_margin_z": -1.0}, "GaussianTau: safety_margin_z is -1.0, expected at least 0"),
    ],
)
def test_options_out_of_range(arguments, message):
    with pytest.raises(OptionError, match=message.replace("(", r"\(")):
        GaussianTau(**arguments)


def test_means_and_deviations_must_match():
    mu, sigma = draw()
    with pytest.raises(ShapeError, match="axis 1 of 'sigma' is 2, expected 3 to match 'mu'"):
        run(GaussianTau(1.5), mu, sigma[:, :2].contiguous(), "reference", bench())
