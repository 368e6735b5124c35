"""What a report says."""

import math

import pytest
import torch

from rc_lib.bound_report import Assumption, BoundReport


def report(**changes):
    inf = math.inf
    parts = {
        "kind": "paper",
        "log_bound": torch.tensor([[0.0, 0.0, -inf], [2.0, inf, -inf]]),
        "log_residual": torch.tensor([[0.0, 0.0, -inf], [1.5, -3.0, -inf]]),
        "log_constant": None,
        "assumptions": [
            Assumption("range", 1, 1, torch.tensor([0.5, -0.25, 1.0]), True),
            Assumption("contraction", 1, None, torch.tensor([0.0, 1.0, 1.0]), False),
            Assumption("range", 1, 2, torch.tensor([0.0, 0.0, 0.0]), True),
        ],
    }
    return BoundReport(**(parts | changes))


def test_claimed_and_slack():
    assert report().claimed.tolist() == [[True, True, True], [True, False, True]]
    assert report().log_slack.tolist() == [[0, 0, 0], [0.5, math.inf, 0]]


def test_failures_are_those_that_the_bound_rests_on():
    assert [(a.name, a.head) for a in report().failures()] == [("range", 1)]
    # c r² = 1 exactly is no contraction; a margin of 0 is within the range.
    assert [a.name for a in report().failures(required=False)] == ["range", "contraction"]


def test_it_reads_as_text():
    text = str(report())
    assert "layer 1, head 1: range FAILS, margin -0.25 (needed)" in text
    assert "layer 1: contraction FAILS, margin 0 (not needed)" in text
    assert "layer 1, head 2: range holds" in text


def test_slack_needs_a_residual():
    with pytest.raises(ValueError, match="from weights alone"):
        _ = report(log_residual=None).log_slack
