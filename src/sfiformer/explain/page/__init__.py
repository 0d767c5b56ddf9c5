"""The flow drawn on the graph: one HTML file that needs nothing beside it."""

from sfiformer.explain.page.write import write_page

__all__ = ["write_page"]
