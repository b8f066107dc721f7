"""`bench crf` compares what computes the same: the loop, pytorch-crf if it is installed, and the definition."""

from __future__ import annotations

import pytest
import torch

from carrywave.benchmarks import crf
from carrywave.benchmarks.peers.crf_loops import ChainCase, Chains

CASE = ChainCase(4, 5, 6)


def test_the_peers_compute_the_same() -> None:
    chains = Chains(CASE, "cpu")
    exact, paths = chains.exact(), chains.loop_paths()
    for found in (chains.ours(), chains.loop()):
        assert all(torch.allclose(one.double(), other, rtol=1e-4, atol=1e-5) for one, other in zip(found, exact, strict=True))
    assert torch.equal(chains.our_paths(), paths)
    assert crf.largest_error(chains) < 1e-5


def test_pytorch_crf_computes_the_same() -> None:
    pytest.importorskip("torchcrf", reason="pytorch-crf is not installed")
    chains = Chains(CASE, "cpu")
    assert all(
        torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4) for one, other in zip(chains.theirs(), chains.exact(), strict=True)
    )
    found = chains.loop_paths()
    assert chains.their_paths() == [found[:length, lane].tolist() for lane, length in enumerate(chains.lengths_B.tolist())]


def test_a_row_compares_with_torchcrf_or_else_with_the_loop() -> None:
    ms = {"loop_eager": 6.0, "loop_graph": 2.0, "ours_eager": 0.5, "ours_graph": 0.1}
    row = crf.row_of(CASE, "loss", ms, 1e-6)
    assert (row["ratio"], row["graph_ratio"], row["torchcrf_eager_ms"], row["target"]) == (12.0, 20.0, None, "ratio >= 5")
    assert crf.row_of(CASE, "loss", ms | {"torchcrf_eager": 9.0}, 1e-6)["ratio"] == 18.0


@pytest.mark.gpu
def test_it_runs() -> None:
    loss, paths = crf.run(quick=True)
    assert (loss["what"], paths["what"]) == ("loss", "paths")
    assert float(str(loss["error"])) < 1e-4
    assert paths["error"] == 0.0
