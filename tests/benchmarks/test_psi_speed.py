"""Cost of the spike-and-slab GP-LVM's bound and gradient, beside the same in plain torch; and what minibatches need to catch up.

make bench
"""

from __future__ import annotations

import pytest

from tests.papers.experiments import spike_slab_cost as cost


@pytest.mark.benchmark
def test_bound_and_gradient():
    print("\n   N    M   Q   CPU s  switches on  plain torch  ratio  memory GB  beyond imports  reference s, GB")
    for size in cost.SIZES:
        found = cost.run_bound(*size)
        reference = cost.REFERENCE.get(size[0], "") if size[1:] == (50, 10) else ""
        print(
            f"{size[0]:5} {size[1]:4} {size[2]:3} {found['seconds']:7.3f} {found['seconds_on']:10.3f} {found['seconds_plain']:12.3f} "
            f"{found['seconds_plain'] / found['seconds']:8.1f} {found['memory']:8.2f} {found['memory_own']:10.2f}         {reference}"
        )
        if size == (1000, 50, 10):
            assert found["memory_own"] < 0.3


@pytest.mark.benchmark
def test_minibatches_reach_the_collapsed_bound():
    found = cost.run_minibatches()
    print(f"\ncollapsed: {found['seconds']:.1f} CPU s to {found['bound']:.0f} from {found['first']:.0f}")
    for steps, seconds, reached in found["history"]:
        distance = (found["bound"] - reached) / abs(found["bound"])
        print(f"{steps} minibatches, {seconds:.1f} CPU s, bound {reached:.0f}, {100 * distance:.2f} % below the collapsed one")
    bound, reached = found["bound"], found["history"][-1][2]
    assert reached >= bound - 0.01 * abs(bound)
    assert reached <= bound + 0.02 * abs(bound)


@pytest.mark.benchmark
def test_sixty_thousand_data_points(real_data):
    real_data("mnist_train")
    found = cost.run_many()
    for epoch, (seconds, bound) in enumerate(found["history"]):
        print(f"\nepoch {epoch}: {seconds:.1f} CPU s, bound per image {bound:.1f}", end="")
    print(f"\n{found['memory']:.2f} GB beyond the data and the imports")
    assert found["history"][-1][1] > found["history"][0][1]
