"""The module path under which the original keeps its windowed variant."""

from lingbot_map.models.gct_stream import GCTStream

__all__ = ['GCTStream']
