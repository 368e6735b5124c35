"""Rank collapse of attention, executable (Dong, Cordonnier, Loukas 2021; arXiv 2103.03404).

The names here are the everyday ones; the rest is in the modules, ground floor first: ``norms``, ``rank``,
``attention``, ``san``, ``corpus``, ``pretrained``, ``results``, ``claims``, ``plotting``, ``explore``.
What is imported here needs torch and nothing heavier.
"""

from rc_lib.norms import composite_norm
from rc_lib.rank import (
    dirichlet_energy,
    effective_rank,
    mean_cosine,
    numerical_rank,
    participation_ratio,
    rank_one_distance,
    relative_residual,
    residual,
    stable_rank,
)
from rc_lib.san import SAN
from rc_lib.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "SAN",
    "Trace",
    "composite_norm",
    "dirichlet_energy",
    "effective_rank",
    "mean_cosine",
    "numerical_rank",
    "participation_ratio",
    "rank_one_distance",
    "relative_residual",
    "residual",
    "stable_rank",
]
