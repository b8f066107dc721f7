"""What a model reads at each step of its numeric data: numbers, and codes of categories, each with its embedding.

The planner and the network both follow it, so that a plan is made for the network that is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

WIDEST = 32  # of a category's embedding
LEAST_DEVIATION = 0.1  # of the last values, in units of train's: a flat stretch does not make everything after it huge


@dataclass(frozen=True)
class StepInputs:
    """A step is `numbers` numbers, then a code for each of `places`: the table in which it is looked up."""

    numbers: int
    tables: tuple[tuple[int, int], ...] = ()  # (values, width) of each embedding
    places: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """The width of what the first layer reads."""
        return self.numbers + sum(self.tables[place][1] for place in self.places)

    @property
    def parameters(self) -> int:
        """The number of parameters of all embeddings."""
        return sum(values * width for values, width in self.tables)


def step_inputs(spec: Spec, facts: DataFacts) -> StepInputs:
    """Return what a step holds: the features, their changes since the last season, and what is known for the horizon."""
    tables = tuple((values, width_of(values)) for values in facts.categories)
    if spec.task != "forecasting":
        return StepInputs(facts.features, tables, tuple(range(len(tables))))
    changes = facts.features - facts.fixed if spec.reads_changes else 0
    ahead = spec.data.horizon
    places = (*range(len(tables)), *(tuple(range(facts.known_categories)) * ahead))
    return StepInputs(facts.features + changes + ahead * facts.known, tables, places)


def width_of(values: int) -> int:
    """Return the width of the embedding of a column with so many values: half of them, at most 32."""
    return min(WIDEST, (values + 1) // 2)
