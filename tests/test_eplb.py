import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra import PlanError
from relibra.eplb import RelibraEplbPolicy, rebalance_experts, rebalance_experts_sglang
from relibra.planning.balancers.even_placement import busiest_rank, even_placement
from relibra.planning.baselines.eplb import eplb_placement


def _rank_tops(load_E, map_P, num_ranks):
    share_P = (load_E / np.bincount(map_P, minlength=len(load_E)))[map_P]
    return share_P.reshape(num_ranks, -1).sum(axis=1).max()


@st.composite
def shapes(draw):
    num_ranks, per_rank, slots = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    E = num_ranks * per_rank
    load_LE = rng.integers(0, draw(st.sampled_from([1, 10, 10_000])) + 1, (2, E)) ** draw(st.sampled_from([1, 2]))
    return load_LE, num_ranks, E + num_ranks * slots


@given(shapes())
def test_three_maps_agree_and_no_rank_is_busier_than_with_eplb(shape):
    load_LE, num_ranks, P = shape
    phy2log, log2phy, logcnt = rebalance_experts(load_LE, P, 1, 1, num_ranks)
    assert phy2log.dtype == log2phy.dtype == logcnt.dtype == np.int64
    for layer, load_E in enumerate(load_LE):
        assert np.array_equal(np.bincount(phy2log[layer], minlength=len(load_E)), logcnt[layer])
        assert logcnt[layer].min() >= 1
        for e, slots_X in enumerate(log2phy[layer]):
            assert slots_X[: logcnt[layer, e]].tolist() == np.flatnonzero(phy2log[layer] == e).tolist()
            assert (slots_X[logcnt[layer, e] :] == -1).all()
        eplb_P = eplb_placement(load_E, P, 1, 1, num_ranks)[0]
        assert _rank_tops(load_E, phy2log[layer], num_ranks) <= _rank_tops(load_E, eplb_P, num_ranks) * (1 + 1e-9)


def test_hierarchical_keeps_groups_on_nodes_and_is_no_worse():
    rng = np.random.default_rng(0)
    weight = rng.integers(1, 1000, (4, 32))
    phy2log = rebalance_experts(weight, 48, 8, 4, 8)[0]
    for layer, map_P in enumerate(phy2log):
        nodes = [set((map_P[n * 12 : (n + 1) * 12] // 4).tolist()) for n in range(4)]
        assert sorted(group for node in nodes for group in node) == list(range(8))
        eplb_P = eplb_placement(weight[layer], 48, 8, 4, 8)[0]
        assert _rank_tops(weight[layer], map_P, 8) <= _rank_tops(weight[layer], eplb_P, 8) * (1 + 1e-9)


@pytest.mark.parametrize(("num_experts", "num_ranks", "slots"), [(64, 32, 1), (128, 64, 1), (256, 32, 2)])
def test_better_than_eplb_on_average_and_without_wasted_slots(num_experts, num_ranks, slots):
    rng = np.random.default_rng(0)
    ours, eplb, repeats = [], [], 0
    for _ in range(12):
        load_E = rng.multinomial(4096 * 8 * num_ranks, rng.dirichlet(np.full(num_experts, 0.8))).astype(float)
        per_rank = num_experts // num_ranks + slots
        placement_RP = even_placement(load_E[None], num_ranks, per_rank)
        repeats += sum(len(row) - len(set(row)) for row in placement_RP.tolist())
        ours.append(busiest_rank(load_E[None], placement_RP) / load_E.sum() * num_ranks)
        eplb.append(_rank_tops(load_E, eplb_placement(load_E, num_ranks * per_rank, 1, 1, num_ranks)[0], num_ranks))
        eplb[-1] *= num_ranks / load_E.sum()
    assert np.mean(ours) - 1 < 0.75 * (np.mean(eplb) - 1)
    assert repeats <= 2


def test_steps_count_one_by_one_and_not_as_a_sum():
    # experts 0 and 1 are busy at the same step: their sum over steps is as any other pair's
    tokens = np.array([[[10, 10, 0, 0]], [[0, 0, 10, 10]]] * 5)
    phy2log, _, _ = rebalance_experts_sglang(tokens, 4, 2, None, 1, "deepseek")
    assert sorted(phy2log[0, :2].tolist()) not in ([0, 1], [2, 3])


def test_sglang_takes_groups_by_the_name_of_the_algorithm():
    tokens = np.random.default_rng(1).integers(1, 1000, (3, 2, 32))
    by_name = {
        name: rebalance_experts_sglang(
            tokens_per_expert=tokens,
            num_physical_experts=48,
            num_local_physical_experts=6,
            num_groups=8,
            num_nodes=4,
            algorithm=name,
        )[0]
        for name in ("deepseek", "deepseek_hierarchical", "auto")
    }
    assert np.array_equal(by_name["auto"], by_name["deepseek_hierarchical"])
    groups = {int(e) // 4 for e in by_name["auto"][0, :12]}
    assert len(groups) == 2
    assert len({int(e) // 4 for e in by_name["deepseek"][0, :12]}) > 2


def test_vllm_keeps_experts_in_their_slots():
    rng = np.random.default_rng(2)
    weight = rng.integers(1, 1000, (3, 32))
    first = RelibraEplbPolicy.rebalance_experts(weight, 40, 1, 1, 8)
    assert np.array_equal(RelibraEplbPolicy.rebalance_experts(weight, 40, 1, 1, 8, first), first)
    shuffled = np.stack([rng.permutation(row.reshape(8, 5), axis=0).ravel() for row in first])
    assert np.array_equal(RelibraEplbPolicy.rebalance_experts(weight, 40, 1, 1, 8, shuffled), shuffled)
    later = RelibraEplbPolicy.rebalance_experts(weight + rng.integers(0, 50, (3, 32)), 40, 1, 1, 8, first)
    plain = RelibraEplbPolicy.rebalance_experts(weight + rng.integers(0, 50, (3, 32)), 40, 1, 1, 8)
    assert (later == first).mean() > (plain == first).mean()
    other_size = RelibraEplbPolicy.rebalance_experts(weight, 48, 1, 1, 8, first)
    assert other_size.shape == (3, 48)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch", reason="torch is not installed; the faces do without it")
    weight = torch.randint(1, 100, (2, 16)).to(torch.bfloat16)
    maps = rebalance_experts(weight, 24, 1, 1, 4)
    assert [m.dtype for m in maps] == [torch.int64] * 3
    expected = rebalance_experts(weight.double().numpy(), 24, 1, 1, 4)
    assert all(np.array_equal(m.numpy(), e) for m, e in zip(maps, expected, strict=True))
    old = RelibraEplbPolicy.rebalance_experts(weight, 24, 1, 1, 4, maps[0])
    assert torch.equal(old, maps[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((2, 8)), 6, 1, 1, 2), "6 physical experts for 8 experts"),
        ((np.ones((2, 8)), 9, 1, 1, 2), "use a multiple of 2"),
        ((np.ones((2, 8)), 8, 3, 1, 2), "groups must divide experts"),
        ((np.ones((2, 8)), 8, 4, 4, 2), "nodes must divide ranks"),
        ((np.ones((2, 8)), 8, 1, 1, 0), "0 ranks"),
        ((np.ones(8), 8, 1, 1, 2), "weight has shape"),
        ((np.ones((0, 8)), 8, 1, 1, 2), "weight has shape"),
        ((np.full((2, 8), np.nan), 8, 1, 1, 2), "non-finite"),
        ((-np.ones((2, 8)), 8, 1, 1, 2), "negative"),
        (([["a"] * 8], 8, 1, 1, 2), "are needed"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments, message):
    with pytest.raises(PlanError, match=message):
        rebalance_experts(*arguments)


@pytest.mark.parametrize(("groups", "nodes", "ranks"), [(3, 2, 2), (1, 3, 2), (3, 2, 4)])
def test_groups_and_nodes_that_do_not_divide_are_ignored(groups, nodes, ranks):
    weight = np.random.default_rng(3).integers(1, 100, (2, 8))
    flat = rebalance_experts(weight, 8, 1, 1, ranks)[0]
    assert np.array_equal(rebalance_experts(weight, 8, groups, nodes, ranks)[0], flat)
    assert np.array_equal(RelibraEplbPolicy.rebalance_experts(weight, 8, groups, nodes, ranks, flat), flat)


def test_wrong_rank_size_gets_a_sentence():
    with pytest.raises(PlanError, match="do not fill ranks of 3"):
        rebalance_experts_sglang(np.ones((1, 2, 8)), 8, 3, None, 1)


NUMPY_TYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "longdouble",
)
TORCH_TYPES = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)


@given(
    st.sampled_from([*(("numpy", one) for one in NUMPY_TYPES), *(("torch", one) for one in TORCH_TYPES)]),
    st.sampled_from([(64, 8, 80), (256, 32, 288), (300, 4, 320), (8, 2, 8)]),
    st.integers(0, 99),
)
@settings(max_examples=30)
def test_maps_are_integers_whatever_the_type_of_the_loads(kind, size, seed):
    torch = pytest.importorskip("torch", reason="torch is not installed; the faces do without it")
    (library, name), (E, ranks, P) = kind, size
    load_LE = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 100, (2, E))
    weight = load_LE.astype(name) if library == "numpy" else torch.from_numpy(load_LE).to(getattr(torch, name))
    given_maps, right_maps = rebalance_experts(weight, P, 1, 1, ranks), rebalance_experts(load_LE, P, 1, 1, ranks)
    for given_map, right_map in zip(given_maps, right_maps, strict=True):
        assert str(given_map.dtype).removeprefix("torch.") == "int64"
        assert np.array_equal(np.asarray(given_map), right_map)
    policy = RelibraEplbPolicy.rebalance_experts(weight, P, 1, 1, ranks, given_maps[0])
    assert np.array_equal(np.asarray(policy), right_maps[0])
    steps = weight[None]
    assert np.array_equal(np.asarray(rebalance_experts_sglang(steps, P, P // ranks, None, 1)[0]), right_maps[0])
