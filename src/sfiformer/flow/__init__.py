"""The flow problem and its solvers: resistances and frictions in, flows of least energy out."""

from sfiformer.flow.energy import Capacitated, Energy, Quadratic, QuadraticL1, Tsallis, solve_energy
from sfiformer.flow.problem import flows_from_scores, solve_flows
from sfiformer.flow.proximal import Proximal

__all__ = [
    "Capacitated",
    "Energy",
    "Proximal",
    "Quadratic",
    "QuadraticL1",
    "Tsallis",
    "flows_from_scores",
    "solve_energy",
    "solve_flows",
]
