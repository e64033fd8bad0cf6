"""Import path of the original network's windowed variant; GCTStream covers both."""

from lingbot_map.models.gct_stream import GCTStream

__all__ = ['GCTStream']
