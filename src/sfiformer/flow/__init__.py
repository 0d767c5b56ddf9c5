"""The flow problem and its solvers: resistances and frictions in, flows of least energy out."""

from sfiformer.flow.problem import flows_from_scores, solve_flows
from sfiformer.flow.proximal import Proximal

__all__ = ["Proximal", "flows_from_scores", "solve_flows"]
