from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ConfigError, cluster_preset
from relibra.simulation import ParallelLayout, model_shape


@given(st.integers(1, 40), st.integers(1, 12))
def test_stages_cut_all_layers_once_and_evenly(layers, stages):
    cuts = ParallelLayout(expert_parallel=1, pipeline_stages=stages).stage_layers(layers)
    assert [layer for cut in cuts for layer in range(layers)[cut]] == list(range(layers))
    sizes = [cut.stop - cut.start for cut in cuts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_ranks_are_numbered_by_stage_then_group():
    layout = ParallelLayout(expert_parallel=4, pipeline_stages=3, data_parallel=2)
    assert layout.num_ranks == 24
    assert str(layout) == "EP 4 x PP 3 x DP 2"
    places = [(*layout.place(rank), layout.rank_in_group(rank)) for rank in range(24)]
    assert places == [(stage, group, rank) for stage in range(3) for group in range(2) for rank in range(4)]


def test_impossible_layouts_are_refused_with_a_sentence():
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8", 16)
    ParallelLayout(expert_parallel=16, pipeline_stages=48).check(cluster, model)
    with pytest.raises(ConfigError, match="pipeline_stages 0: it must be a whole number of at least 1"):
        ParallelLayout(expert_parallel=1, pipeline_stages=0)
    with pytest.raises(ConfigError, match="EP 4096 x PP 4 x DP 8 has 131072 ranks: at most 65536"):
        ParallelLayout(expert_parallel=4096, pipeline_stages=4, data_parallel=8)
    with pytest.raises(ConfigError, match=r"groups of 8 ranks, cluster 'h100x8' has 16: .*cluster.with_ranks\(8\)"):
        ParallelLayout(expert_parallel=8).check(cluster, model)
    with pytest.raises(ConfigError, match="100 experts of 'qwen3-30b-a3b' do not spread evenly over 16 ranks"):
        ParallelLayout(expert_parallel=16).check(cluster, replace(model, experts=100))
    with pytest.raises(ConfigError, match="48 expert layers of 'qwen3-30b-a3b' do not fill 49 pipeline stages"):
        ParallelLayout(expert_parallel=16, pipeline_stages=49).check(cluster, model)
