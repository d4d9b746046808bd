"""Budgets: what the deployed network may cost, as constraints with multipliers."""

from prunus.budget.budget import Budget
from prunus.budget.lines import Limit, Line, parse, read_lines
from prunus.budget.multiplier import BudgetMultiplier

__all__ = ["Budget", "BudgetMultiplier", "Limit", "Line", "parse", "read_lines"]
