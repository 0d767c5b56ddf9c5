"""Graph transformers with exact sparse-flow-induced attention."""
